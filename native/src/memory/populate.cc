#include "memory/populate.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ucm::memory {
namespace {

constexpr std::uint64_t kChunk = 32ULL << 20;
constexpr std::uint64_t kPage = 4096;

void touch_each_page(std::byte* at, std::uint64_t bytes, Touch touch) noexcept {
  for (std::uint64_t p = 0; p < bytes; p += kPage) {
    volatile std::byte& byte = at[p];
    if (touch == Touch::kWrite) {
      byte = std::byte{0};
    } else {
      [[maybe_unused]] const std::byte seen = byte;
    }
  }
}

}  // namespace

int populate(void* data, std::uint64_t bytes, unsigned threads, Touch touch) noexcept {
  const std::uint64_t chunks = (bytes + kChunk - 1) / kChunk;
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1U, 16U);
  threads = static_cast<unsigned>(std::min<std::uint64_t>(threads, chunks));
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> error{0};
  auto* const base = static_cast<std::byte*>(data);
  const auto work = [&]() noexcept {
    for (std::uint64_t i = next++; i < chunks && error == 0; i = next++) {
      std::byte* const at = base + i * kChunk;
      const std::uint64_t n = std::min(kChunk, bytes - i * kChunk);
      if (::madvise(at, n, MADV_POPULATE_WRITE) == 0) continue;
      if (errno == EINVAL) {
        touch_each_page(at, n, touch);
      } else {
        error = errno;
      }
    }
  };
  std::vector<std::thread> team;
  try {
    for (unsigned t = 1; t < threads; ++t) team.emplace_back(work);
  } catch (...) {  // fewer threads: slower, not wrong
  }
  work();
  for (auto& t : team) t.join();
  return error;
}

}  // namespace ucm::memory
