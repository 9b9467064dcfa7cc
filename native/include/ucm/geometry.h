// The shape of every object of one store instance. Fixed at creation: a task never carries a size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ucm {

/// Alignment of shards inside an object, of store-owned buffers and of file offsets: what O_DIRECT
/// needs on every file system we met.
inline constexpr std::size_t kIoAlign = 4096;

[[nodiscard]] constexpr std::size_t align_up(std::size_t n, std::size_t a) noexcept {
  return (n + a - 1) / a * a;
}

/// One run of engine memory: `count` pieces of `bytes`, `stride` bytes apart. A contiguous page is
/// {page_bytes, 1, 0}; a slice of heads of a token-major page is {slice_bytes, tokens, row_bytes}.
struct RunShape {
  std::uint64_t bytes = 0;
  std::uint64_t count = 1;
  std::uint64_t stride = 0;
  [[nodiscard]] std::uint64_t total() const noexcept { return bytes * count; }
};

/// Objects of `shard_count` shards of `shard_bytes` each. A shard is the concatenation of
/// `runs_per_shard` runs; run r has the shape runs[r % runs.size()]. Most engines have one shape; K and V
/// that lie differently in a page which is wider than a stored block have two.
struct Geometry {
  std::uint32_t shard_count = 0;
  std::uint64_t shard_bytes = 0;
  std::uint32_t runs_per_shard = 1;
  std::vector<RunShape> runs{RunShape{}};
  std::string
      layout;  ///< layout descriptor of the bytes inside an object (ucm_core/adapter/layout)

  /// Bytes of all runs of a shard: what shard_bytes has to be.
  [[nodiscard]] std::uint64_t total_of_runs() const noexcept {
    std::uint64_t n = 0;
    for (std::uint32_t r = 0; r < runs_per_shard; ++r) n += runs[r % runs.size()].total();
    return n;
  }
  /// Distance between shards inside an object's data region.
  [[nodiscard]] std::uint64_t shard_stride() const noexcept {
    return align_up(shard_bytes, kIoAlign);
  }
  [[nodiscard]] std::uint64_t shard_offset(std::uint32_t shard) const noexcept {
    return shard * shard_stride();
  }
  /// The most bytes that a packed shard may have: a page less than the shard, or it is not worth it.
  [[nodiscard]] std::uint64_t packed_limit() const noexcept { return shard_stride() - kIoAlign; }
  /// Bytes of an object's data region, padding included.
  [[nodiscard]] std::uint64_t object_bytes() const noexcept { return shard_count * shard_stride(); }
};

}  // namespace ucm
