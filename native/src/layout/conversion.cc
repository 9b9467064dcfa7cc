// From two descriptors to the strided copies between them.
#include <algorithm>

#include "ucm/layout.h"

namespace ucm {
namespace {

using Part = Layout::Part;
using Placed = Layout::Placed;

/// One loop of a plan: indices that both sides count alike.
struct Loop {
  std::uint64_t size;
  std::uint64_t source;
  std::uint64_t target;
};

std::string name_of(Dim dim) {
  return std::string("'").append(kDimNames[static_cast<std::size_t>(dim)]).append("'");
}

std::vector<Placed> digits(const Part& part, Dim dim) {
  std::vector<Placed> out;
  for (const Placed& placed : part.axes) {
    if (placed.axis.dim == dim) out.push_back(placed);
  }
  return out;
}

/// Bytes between neighbours when the dimension is counted in steps of `step`.
std::uint64_t stride_at(const std::vector<Placed>& digits, std::uint64_t step) noexcept {
  for (const Placed& d : digits) {
    if (d.axis.step <= step && step < d.axis.step * d.axis.size) {
      return d.stride * (step / d.axis.step);
    }
  }
  return 0;  // not reached: digits cover the dimension
}

/// Both sides split at each other's steps.
bool add_loops(const Part& source, const Part& target, Dim dim, std::vector<Loop>& loops,
               std::string& why_not) {
  const auto ours = digits(source, dim);
  const auto theirs = digits(target, dim);
  std::vector<std::uint64_t> ends;
  for (const auto* side : {&ours, &theirs}) {
    for (const Placed& d : *side) {
      ends.push_back(d.axis.step);
      ends.push_back(d.axis.step * d.axis.size);
    }
  }
  std::sort(ends.begin(), ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    if (ends[i + 1] % ends[i] != 0) {
      why_not = "splits of " + name_of(dim) + " by " + std::to_string(ends[i]) + " and by " +
                std::to_string(ends[i + 1]) + " do not fit each other";
      return false;
    }
    loops.push_back({ends[i + 1] / ends[i], stride_at(ours, ends[i]), stride_at(theirs, ends[i])});
  }
  return true;
}

bool same_elements(const Layout& source, const Layout& target, std::string& why_not) {
  if (source.dtype() != target.dtype()) {
    why_not = "elements differ: " + source.dtype() + " is stored, " + target.dtype() + " wanted";
    return false;
  }
  if (source.opaque() && source != target) {
    why_not = source.dtype() + " bytes have no described order to convert";
    return false;
  }
  for (std::size_t kv = 0; kv < 2; ++kv) {
    for (const Dim dim : {Dim::kLayer, Dim::kKv, Dim::kToken, Dim::kHead, Dim::kElem}) {
      if (source.total(dim, kv) == target.total(dim, kv)) continue;
      why_not = std::to_string(source.total(dim, kv)) + " of " + name_of(dim) + " are stored, " +
                std::to_string(target.total(dim, kv)) + " wanted";
      return false;
    }
  }
  return true;
}

/// Byte offset of layer `index` in a part.
std::uint64_t layer_offset(const Part& part, std::uint64_t index) noexcept {
  std::uint64_t at = 0;
  for (const Placed& placed : part.axes) {
    if (placed.axis.dim != Dim::kLayer) continue;
    at += index / placed.axis.step % placed.axis.size * placed.stride;
  }
  return at;
}

}  // namespace

std::optional<Conversion> Conversion::plan(const Layout& source, const Layout& target,
                                           std::uint64_t source_align, std::uint64_t target_align,
                                           std::string& why_not) {
  if (!same_elements(source, target, why_not)) return std::nullopt;
  Conversion out;
  out.source_bytes_ = source.span_bytes(source_align);
  out.target_bytes_ = target.span_bytes(target_align);
  const bool split_kv = source.branched() || target.branched();
  const auto ours = source.parts(source_align, split_kv);
  const auto theirs = target.parts(target_align, split_kv);

  const std::uint64_t shards = target.shard_count();
  const std::uint64_t shard_bytes = out.target_bytes_ / shards;
  out.shards_ = shards;
  out.target_stride_ = shard_bytes;

  if (source == target) {  // also what cannot be described
    auto copy = ConvertPlan::make({}, {}, {}, source.shard_bytes(), out.source_bytes_ / shards,
                                  shard_bytes, why_not);
    if (!copy) return std::nullopt;
    std::vector<std::uint64_t> starts;
    for (std::uint64_t i = 0; i < shards; ++i) starts.push_back(i * (out.source_bytes_ / shards));
    out.pieces_.push_back({*copy, 0, std::move(starts)});
    return out;
  }
  for (std::size_t i = 0; i < ours.size(); ++i) {
    std::vector<Loop> loops;
    for (const Dim dim : {Dim::kLayer, Dim::kKv, Dim::kToken, Dim::kHead, Dim::kElem}) {
      if (dim == Dim::kLayer && shards > 1) continue;
      if (!add_loops(ours[i], theirs[i], dim, loops, why_not)) return std::nullopt;
    }
    std::vector<std::uint64_t> sizes, from, to;
    for (const Loop& loop : loops) {
      sizes.push_back(loop.size);
      from.push_back(loop.source);
      to.push_back(loop.target);
    }
    std::vector<std::uint64_t> starts;
    for (std::uint64_t shard = 0; shard < shards; ++shard) {
      starts.push_back(ours[i].offset + layer_offset(ours[i], shard));
    }
    const std::uint64_t farthest = *std::max_element(starts.begin(), starts.end());
    auto plan =
        ConvertPlan::make(sizes, from, to, source.item_bytes(), out.source_bytes_ - farthest,
                          shard_bytes - theirs[i].offset, why_not);
    if (!plan) {
      why_not = "from " + source.text() + " to " + target.text() + ": " + why_not;
      return std::nullopt;
    }
    out.pieces_.push_back({*plan, theirs[i].offset, std::move(starts)});
  }
  return out;
}

void Conversion::run(std::byte* target, const std::byte* source, std::uint64_t begin,
                     std::uint64_t end) const noexcept {
  for (std::uint64_t shard = begin; shard < end; ++shard) {
    std::byte* const to = target + shard * target_stride_;
    for (const Piece& piece : pieces_) {
      piece.plan.run(to + piece.target_offset, source + piece.source_of_shard[shard]);
    }
  }
}

bool Conversion::straight() const noexcept {
  return pieces_.size() == 1 && pieces_[0].plan.dims() == 0;
}

}  // namespace ucm
