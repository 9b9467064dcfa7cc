#include "compress/planes.h"

#include <cstring>

namespace ucm::compress {
namespace {

// With the width known the compiler turns both loops into shuffles.
template <std::size_t W>
void split(const std::byte* __restrict data, std::size_t n, std::byte* __restrict planes) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t p = 0; p < W; ++p) planes[p * n + i] = data[i * W + p];
  }
}

void split2(const std::byte* __restrict data, std::size_t n, std::byte* __restrict low,
            std::byte* __restrict high) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    low[i] = data[2 * i];
    high[i] = data[2 * i + 1];
  }
}

void join2(const std::byte* __restrict low, const std::byte* __restrict high, std::size_t n,
           std::byte* __restrict data) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    data[2 * i] = low[i];
    data[2 * i + 1] = high[i];
  }
}

void join4(const std::byte* __restrict a, const std::byte* __restrict b,
           const std::byte* __restrict c, const std::byte* __restrict d, std::size_t n,
           std::byte* __restrict data) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    data[4 * i] = a[i];
    data[4 * i + 1] = b[i];
    data[4 * i + 2] = c[i];
    data[4 * i + 3] = d[i];
  }
}

}  // namespace

void split_planes(const std::byte* data, std::size_t bytes, std::size_t width,
                  std::byte* planes) noexcept {
  if (bytes == 0) return;  // nothing has no address, and memcpy wants one
  const std::size_t n = bytes / width;
  switch (width) {
    case 2:
      split2(data, n, planes, planes + n);
      break;
    case 4:
      split<4>(data, n, planes);
      break;
    case 8:
      split<8>(data, n, planes);
      break;
    default:
      std::memcpy(planes, data, n);
  }
  std::memcpy(planes + n * width, data + n * width, bytes - n * width);
}

void join_planes(const std::byte* const* planes, std::size_t bytes, std::size_t width,
                 std::byte* data) noexcept {
  if (bytes == 0) return;
  const std::size_t n = bytes / width;
  switch (width) {
    case 2:
      join2(planes[0], planes[1], n, data);
      break;
    case 4:
      join4(planes[0], planes[1], planes[2], planes[3], n, data);
      break;
    case 8:
      for (std::size_t i = 0; i < n; ++i) {
        for (std::size_t p = 0; p < 8; ++p) data[i * 8 + p] = planes[p][i];
      }
      break;
    default:
      std::memcpy(data, planes[0], n);
  }
  std::memcpy(data + n * width, planes[width - 1] + n, bytes - n * width);
}

}  // namespace ucm::compress
