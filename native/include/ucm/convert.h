// Layout conversion: N-dimensional strided copies between two byte orders of the same content
// (a reader whose layout descriptor differs from the writer's). layout.h derives plans from two
// descriptors once; running one allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace ucm {

/// dst[sum(i_k * dst_stride_k) .. + inner) = src[sum(i_k * src_stride_k) .. + inner) for every index
/// vector i with i_k < extent_k. Immutable once made; safe to share between threads.
class ConvertPlan {
 public:
  static constexpr std::size_t kMaxDims = 16;  ///< before merging; engines need up to nine

  /// Checks and simplifies a plan. Strides and `inner_bytes` are in bytes, strides are not negative;
  /// `src_bytes` and `dst_bytes` are the sizes of the two regions: an index that reaches outside, or
  /// a destination written twice, is refused. Returns nullopt and sets `error` when refused.
  [[nodiscard]] static std::optional<ConvertPlan> make(std::span<const std::uint64_t> extents,
                                                       std::span<const std::uint64_t> src_strides,
                                                       std::span<const std::uint64_t> dst_strides,
                                                       std::uint64_t inner_bytes,
                                                       std::uint64_t src_bytes,
                                                       std::uint64_t dst_bytes, std::string& error);

  /// Run the plan on two regions of (at least) the sizes given to make(). They do not overlap.
  void run(std::byte* dst, const std::byte* src) const noexcept;

  [[nodiscard]] std::uint64_t src_bytes() const noexcept { return src_bytes_; }
  [[nodiscard]] std::uint64_t dst_bytes() const noexcept { return dst_bytes_; }
  /// Dimensions left after merging; 0 means one plain copy.
  [[nodiscard]] std::size_t dims() const noexcept { return dims_; }

 private:
  struct Dim {
    std::uint64_t extent = 1;
    std::uint64_t src = 0;
    std::uint64_t dst = 0;
  };

  void simplify() noexcept;
  void order_for_tiles() noexcept;
  void run_outer(std::size_t dim, std::byte* dst, const std::byte* src) const noexcept;
  void run_tile(std::byte* dst, const std::byte* src) const noexcept;
  void run_line(const Dim& d, std::uint64_t n, std::byte* dst, const std::byte* src) const noexcept;

  std::array<Dim, kMaxDims> dim_{};  ///< outermost loop first
  std::size_t dims_ = 0;
  std::uint64_t inner_ = 0;
  std::uint64_t src_bytes_ = 0;
  std::uint64_t dst_bytes_ = 0;
};

}  // namespace ucm
