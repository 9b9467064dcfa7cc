#include "ucm/convert.h"

#include <algorithm>
#include <cstring>

#include "ucm/copy.h"

namespace ucm {
namespace {

/// Elements a side of a transposing tile: two tiles of 32 lines each fit any L1.
constexpr std::uint64_t kTile = 32;

/// a*b + c, or nullopt when it does not fit 63 bits (no region is that large).
bool add_reach(std::uint64_t extent, std::uint64_t stride, std::uint64_t& reach) noexcept {
  std::uint64_t step = 0;
  return !__builtin_mul_overflow(extent - 1, stride, &step) &&
         !__builtin_add_overflow(reach, step, &reach);
}

template <std::size_t N>
void line_of(std::uint64_t n, std::byte* dst, std::uint64_t dst_step, const std::byte* src,
             std::uint64_t src_step) noexcept {
  for (std::uint64_t i = 0; i < n; ++i) {
    std::memcpy(dst + i * dst_step, src + i * src_step, N);
  }
}

}  // namespace

std::optional<ConvertPlan> ConvertPlan::make(std::span<const std::uint64_t> extents,
                                             std::span<const std::uint64_t> src_strides,
                                             std::span<const std::uint64_t> dst_strides,
                                             std::uint64_t inner_bytes, std::uint64_t src_bytes,
                                             std::uint64_t dst_bytes, std::string& error) {
  const std::size_t n = extents.size();
  if (n > kMaxDims || src_strides.size() != n || dst_strides.size() != n) {
    error = "a plan has at most " + std::to_string(kMaxDims) +
            " dimensions and one source and destination stride for each; got " + std::to_string(n) +
            " extents, " + std::to_string(src_strides.size()) + " and " +
            std::to_string(dst_strides.size()) + " strides";
    return std::nullopt;
  }
  if (inner_bytes == 0) {
    error = "inner_bytes is 0";
    return std::nullopt;
  }
  ConvertPlan plan;
  plan.inner_ = inner_bytes;
  plan.src_bytes_ = src_bytes;
  plan.dst_bytes_ = dst_bytes;
  std::uint64_t src_reach = inner_bytes, dst_reach = inner_bytes;
  for (std::size_t i = 0; i < n; ++i) {
    if (extents[i] == 0) {
      error = "extent of dimension " + std::to_string(i) + " is 0";
      return std::nullopt;
    }
    if (!add_reach(extents[i], src_strides[i], src_reach) ||
        !add_reach(extents[i], dst_strides[i], dst_reach)) {
      error = "dimension " + std::to_string(i) + " overflows 64 bits";
      return std::nullopt;
    }
    plan.dim_[i] = {extents[i], src_strides[i], dst_strides[i]};
  }
  if (src_reach > src_bytes || dst_reach > dst_bytes) {
    error = "the plan reaches byte " + std::to_string(src_reach) + " of a source of " +
            std::to_string(src_bytes) + " and byte " + std::to_string(dst_reach) +
            " of a destination of " + std::to_string(dst_bytes);
    return std::nullopt;
  }
  plan.dims_ = n;
  plan.simplify();
  // Sorted by destination stride, each stride must step over everything faster: else two indices
  // write the same byte.
  std::uint64_t below = plan.inner_;
  for (std::size_t i = plan.dims_; i-- > 0;) {
    const Dim& d = plan.dim_[i];
    if (d.dst < below) {
      error = "destination bytes are written twice: a stride of " + std::to_string(d.dst) +
              " does not step over " + std::to_string(below) + " faster bytes";
      return std::nullopt;
    }
    below += (d.extent - 1) * d.dst;
  }
  plan.order_for_tiles();
  return plan;
}

void ConvertPlan::simplify() noexcept {
  const auto first = dim_.begin();
  auto last = std::remove_if(first, first + static_cast<std::ptrdiff_t>(dims_),
                             [](const Dim& d) { return d.extent == 1; });
  std::sort(first, last, [](const Dim& a, const Dim& b) {
    return a.dst != b.dst ? a.dst > b.dst : a.src > b.src;
  });
  // Neighbours that are one dimension in both orders become one.
  auto out = first;
  for (auto it = first; it != last; ++it) {
    if (it != first) {
      Dim& outer = *std::prev(out);
      if (outer.dst == it->dst * it->extent && outer.src == it->src * it->extent) {
        outer = {outer.extent * it->extent, it->src, it->dst};
        continue;
      }
    }
    *out++ = *it;
  }
  if (out != first && std::prev(out)->dst == inner_ && std::prev(out)->src == inner_) {
    inner_ *= std::prev(out)->extent;
    --out;
  }
  dims_ = static_cast<std::size_t>(out - first);
}

void ConvertPlan::order_for_tiles() noexcept {
  // The tile walks the two fastest loops. The fastest destination dimension is last already; beside
  // it goes the one whose source is fastest, so that both sides touch neighbouring lines.
  if (dims_ < 3) return;
  const auto last = dim_.begin() + static_cast<std::ptrdiff_t>(dims_);
  const auto fast = std::min_element(dim_.begin(), last,
                                     [](const Dim& a, const Dim& b) { return a.src < b.src; });
  if (fast < last - 2) std::rotate(fast, fast + 1, last - 1);
}

void ConvertPlan::run_line(const Dim& d, std::uint64_t n, std::byte* dst,
                           const std::byte* src) const noexcept {
  switch (inner_) {
    case 1:
      return line_of<1>(n, dst, d.dst, src, d.src);
    case 2:
      return line_of<2>(n, dst, d.dst, src, d.src);
    case 4:
      return line_of<4>(n, dst, d.dst, src, d.src);
    case 8:
      return line_of<8>(n, dst, d.dst, src, d.src);
    case 16:
      return line_of<16>(n, dst, d.dst, src, d.src);
    case 32:
      return line_of<32>(n, dst, d.dst, src, d.src);
    case 64:
      return line_of<64>(n, dst, d.dst, src, d.src);
    case 128:
      return line_of<128>(n, dst, d.dst, src, d.src);
    default:
      for (std::uint64_t i = 0; i < n; ++i) copy_bytes(dst + i * d.dst, src + i * d.src, inner_);
  }
}

void ConvertPlan::run_tile(std::byte* dst, const std::byte* src) const noexcept {
  const Dim& slow = dim_[dims_ - 2];
  const Dim& fast = dim_[dims_ - 1];
  for (std::uint64_t s0 = 0; s0 < slow.extent; s0 += kTile) {
    const std::uint64_t s1 = std::min(s0 + kTile, slow.extent);
    for (std::uint64_t f0 = 0; f0 < fast.extent; f0 += kTile) {
      const std::uint64_t n = std::min(kTile, fast.extent - f0);
      for (std::uint64_t s = s0; s < s1; ++s) {
        run_line(fast, n, dst + s * slow.dst + f0 * fast.dst, src + s * slow.src + f0 * fast.src);
      }
    }
  }
}

void ConvertPlan::run_outer(std::size_t dim, std::byte* dst, const std::byte* src) const noexcept {
  if (dim + 2 >= dims_) return run_tile(dst, src);
  const Dim& d = dim_[dim];
  for (std::uint64_t i = 0; i < d.extent; ++i) run_outer(dim + 1, dst + i * d.dst, src + i * d.src);
}

void ConvertPlan::run(std::byte* dst, const std::byte* src) const noexcept {
  if (dims_ == 0) return copy_bytes(dst, src, inner_);
  if (dims_ == 1) return run_line(dim_[0], dim_[0].extent, dst, src);
  run_outer(0, dst, src);
}

}  // namespace ucm
