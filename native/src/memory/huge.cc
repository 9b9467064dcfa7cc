#include "memory/huge.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace ucm::memory {
namespace {

/// Huge pages asked for by one call: the kernel drains per-CPU lists once a call.
constexpr std::uint64_t kChunk = 32 * kHugePage;
constexpr auto kBudget = std::chrono::seconds(10);

}  // namespace

void* map_shared_aligned(int fd, off_t offset, std::uint64_t bytes) noexcept {
  // Reserve more than needed, map inside, give back both ends.
  void* const reserved = ::mmap(nullptr, bytes + kHugePage, PROT_NONE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) return MAP_FAILED;
  auto* const base = static_cast<std::byte*>(reserved);
  const std::uint64_t head =
      (kHugePage - reinterpret_cast<std::uintptr_t>(base) % kHugePage) % kHugePage;
  void* const p =
      ::mmap(base + head, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, offset);
  if (p == MAP_FAILED) {
    const int error = errno;
    ::munmap(base, bytes + kHugePage);
    errno = error;
    return MAP_FAILED;
  }
  if (head > 0) ::munmap(base, head);
  // The mapping ends at a page border; what lies behind it is still ours.
  const std::uint64_t page = 4096;
  const std::uint64_t mapped = (bytes + page - 1) / page * page;
  if (const std::uint64_t end = bytes + kHugePage; head + mapped < end) {
    ::munmap(base + head + mapped, end - head - mapped);
  }
  return p;
}

std::uint64_t back_with_huge_pages(int fd, off_t offset, void* data, std::uint64_t bytes,
                                   unsigned threads) noexcept {
  const std::uint64_t whole = bytes / kHugePage * kHugePage;
  const std::uint64_t chunks = (whole + kChunk - 1) / kChunk;
  if (chunks == 0) return 0;
  if (threads == 0) threads = std::clamp(std::thread::hardware_concurrency(), 1U, 16U);
  threads = static_cast<unsigned>(std::min<std::uint64_t>(threads, chunks));
  const auto end = std::chrono::steady_clock::now() + kBudget;
  std::atomic<std::uint64_t> next{0};
  std::atomic<std::uint64_t> granted{0};
  std::atomic<bool> refused{false};
  auto* const base = static_cast<std::byte*>(data);
  const auto work = [&]() noexcept {
    for (std::uint64_t i = next++; i < chunks && !refused; i = next++) {
      const std::uint64_t from = i * kChunk;
      const std::uint64_t n = std::min(kChunk, whole - from);
      // The kernel leaves ranges without any page alone. A fault in a full file system would kill us,
      // so the first page of each is allocated by a call that can fail.
      for (std::uint64_t at = from; at < from + n && !refused; at += kHugePage) {
        if (::posix_fallocate(fd, offset + static_cast<off_t>(at), 1) != 0) refused = true;
      }
      if (refused) return;
      int rc = ::madvise(base + from, n, MADV_COLLAPSE);
      if (rc != 0 && errno == EAGAIN) rc = ::madvise(base + from, n, MADV_COLLAPSE);
      if (rc == 0) {
        granted += n;
      } else if (errno != EAGAIN) {
        refused = true;  // no such call, not allowed, no memory: asking on would only take time
      }
      if (std::chrono::steady_clock::now() > end) refused = true;
    }
  };
  std::vector<std::thread> team;
  try {
    for (unsigned t = 1; t < threads; ++t) team.emplace_back(work);
  } catch (...) {  // fewer threads: slower, not wrong
  }
  work();
  for (auto& t : team) t.join();
  return granted;
}

}  // namespace ucm::memory
