// The copy kernel: engine memory <-> store-owned buffers, both plain host memory.
//
// KV blocks are large and are not read again by the copying core, so large copies use non-temporal
// stores: they skip the read of the destination line that an ordinary store costs and leave the
// caches to the engine. The widest vector unit of the running CPU is chosen once per process; other
// CPUs (and sanitizer builds) use memcpy.
//
// Every function is thread-safe, never allocates, never throws, and orders its stores before it
// returns: a release store (or a futex wake) that follows publishes the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ucm/geometry.h"

namespace ucm {

/// Bytes moved by one call from which non-temporal stores pay (measured, docs/decisions.md).
inline constexpr std::size_t kStreamThreshold = 64 * 1024;
/// Shorter contiguous pieces are always copied with ordinary stores: a piece that fills only part of
/// a cache line would leave the write-combining buffer half full.
inline constexpr std::size_t kStreamMinPiece = 1024;

/// Copy `n` bytes; the ranges do not overlap.
void copy_bytes(void* dst, const void* src, std::size_t n) noexcept;

/// Gather: `runs` runs of shape `run` that start at `addresses[i]`, one after the other into `dst`
/// (`runs * run.total()` bytes). No address may be 0.
void copy_runs_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
                  const RunShape& run) noexcept;

/// Scatter: the reverse of copy_runs_in. A run whose address is 0 is skipped: its source bytes are
/// stepped over and nothing is written.
void copy_runs_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                   const RunShape& run) noexcept;

/// Which vector unit large copies use on this CPU: "avx512", "avx2", "sse2" or "memcpy".
[[nodiscard]] const char* copy_kernel_name() noexcept;

}  // namespace ucm
