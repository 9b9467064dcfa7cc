// Bytes of elements, sorted by their place in the element.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ucm::compress {

/// Bytes of plane `p` of `bytes` bytes of elements of `width`: what is left over behind the last whole
/// element goes to the last plane.
[[nodiscard]] constexpr std::size_t plane_bytes(std::size_t bytes, std::size_t width,
                                                std::size_t p) noexcept {
  return bytes / width + (p + 1 == width ? bytes % width : 0);
}

/// planes[p][i] = data[i * width + p], planes one behind the other. `width` is 1, 2, 4 or 8.
void split_planes(const std::byte* data, std::size_t bytes, std::size_t width,
                  std::byte* planes) noexcept;

/// The way back; `planes[p]` are where they are.
void join_planes(const std::byte* const* planes, std::size_t bytes, std::size_t width,
                 std::byte* data) noexcept;

}  // namespace ucm::compress
