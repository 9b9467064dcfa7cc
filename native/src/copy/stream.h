// Internal: the non-temporal variants behind copy.h, exposed so that tests can run every variant
// that the CPU has, not only the one chosen.
#pragma once

#include <cstddef>
#include <span>

namespace ucm::copy {

/// Copies n bytes with non-temporal stores where both ends allow; the caller fences.
using StreamFn = void (*)(std::byte* dst, const std::byte* src, std::size_t n) noexcept;

struct StreamKernel {
  const char* name;
  StreamFn fn;     ///< nullptr: plain memcpy, nothing to fence
  bool supported;  ///< by the running CPU
};

/// All variants compiled in, widest first; the last one ("memcpy") is always supported.
[[nodiscard]] std::span<const StreamKernel> stream_kernels() noexcept;

/// Orders non-temporal stores before what follows.
void stream_fence() noexcept;

}  // namespace ucm::copy
