// Shared memory in huge pages. A device that reads into scattered 4 KiB pages needs a segment for each
// of them: a virtual disk moved 1.2 GB/s into such pages and 2.4 GB/s into huge ones, and copies miss
// the TLB less. tmpfs gives huge pages only where it was mounted so, but collapses what it is asked to.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace ucm::memory {

inline constexpr std::uint64_t kHugePage = 2ULL << 20;

/// Maps `bytes` of `fd` from `offset` (a multiple of kHugePage) shared and writable, at an address that
/// is a multiple of kHugePage, so that huge pages can be mapped whole. MAP_FAILED and errno on failure.
[[nodiscard]] void* map_shared_aligned(int fd, off_t offset, std::uint64_t bytes) noexcept;

/// Gives a range that nobody uses yet huge pages, with several threads, for at most ten seconds.
/// `data` is where `map_shared_aligned` put `[offset, offset + bytes)` of `fd`. Pages that the kernel
/// does not grant stay as they are (holes): allocate the range afterwards. Returns the bytes granted.
std::uint64_t back_with_huge_pages(int fd, off_t offset, void* data, std::uint64_t bytes,
                                   unsigned threads) noexcept;

}  // namespace ucm::memory
