#include "cache/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ucm::cache {
namespace {

long futex(std::atomic<std::uint32_t>& word, int op, std::uint32_t value,
           const timespec* timeout) noexcept {
  return ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), op, value, timeout, nullptr,
                   0);
}

}  // namespace

void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected,
                std::chrono::nanoseconds timeout) noexcept {
  const auto ns = timeout.count();
  const timespec t{static_cast<time_t>(ns / 1'000'000'000), static_cast<long>(ns % 1'000'000'000)};
  (void)futex(word, FUTEX_WAIT, expected, &t);
}

void futex_wake_one(std::atomic<std::uint32_t>& word) noexcept {
  (void)futex(word, FUTEX_WAKE, 1, nullptr);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) noexcept {
  (void)futex(word, FUTEX_WAKE, INT_MAX, nullptr);
}

std::uint32_t monotonic_seconds() noexcept {
  timespec t{};
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint32_t>(t.tv_sec) + 1;
}

}  // namespace ucm::cache
