// Locks that know their owner: a process that dies with one does not keep the others out.
#include <chrono>

#include "cache/futex.h"
#include "cache/segment.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ucm::cache {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kWaiters = 0x8000'0000U;
constexpr int kSpins = 200;
constexpr auto kSlice = 10ms;  // then look whether the owner still lives
constexpr auto kLockPatience = 2s;

void relax() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

bool Segment::try_lock(Shared<std::uint32_t>& word) noexcept {
  std::uint32_t expected = 0;
  return word.compare_exchange_strong(expected, self_ + 1, std::memory_order_acquire,
                                      std::memory_order_relaxed);
}

bool Segment::lock(Shared<std::uint32_t>& word) noexcept {
  if (try_lock(word)) return true;
  for (int i = 0; i < kSpins; ++i) {
    relax();
    if (word.load(std::memory_order_relaxed) == 0 && try_lock(word)) return true;
  }
  const auto give_up = std::chrono::steady_clock::now() + kLockPatience;
  for (;;) {
    std::uint32_t seen = word.load(std::memory_order_relaxed);
    if (seen == 0) {
      // With the waiters bit: others may sleep behind us, so our unlock wakes.
      if (word.compare_exchange_weak(seen, (self_ + 1) | kWaiters, std::memory_order_acquire,
                                     std::memory_order_relaxed)) {
        return true;
      }
      continue;
    }
    if ((seen & kWaiters) == 0 &&
        !word.compare_exchange_weak(seen, seen | kWaiters, std::memory_order_relaxed)) {
      continue;
    }
    const auto before = std::chrono::steady_clock::now();
    futex_wait(word, seen | kWaiters, kSlice);
    const auto now = std::chrono::steady_clock::now();
    if (now - before < kSlice) continue;
    const std::uint32_t owner = (seen & ~kWaiters) - 1;
    if (!alive(owner)) break_locks(owner);
    if (now >= give_up) return false;
  }
}

void Segment::unlock(Shared<std::uint32_t>& word) noexcept {
  if ((word.exchange(0, std::memory_order_release) & kWaiters) != 0) futex_wake_one(word);
}

void Segment::break_locks(std::uint32_t dead) noexcept {
  const auto free = [dead](Shared<std::uint32_t>& word) noexcept {
    std::uint32_t seen = word.load(std::memory_order_relaxed);
    while ((seen & ~kWaiters) == dead + 1) {
      if (word.compare_exchange_weak(seen, 0, std::memory_order_acq_rel)) {
        futex_wake_all(word);
        return;
      }
    }
  };
  free(header_->extent_lock);
  for (auto& c : header_->geometry) free(c.lock);
  for (std::uint32_t i = 0; i < header_->buckets; ++i) free(buckets_[i].lock);
}

}  // namespace ucm::cache
