#include "ucm/layout.h"

#include <algorithm>
#include <charconv>

#include "ucm/geometry.h"

namespace ucm {
namespace {

constexpr std::size_t kMaxText = 4096;
constexpr std::size_t kMaxAxes = 32;
constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 40;

struct ItemType {
  std::string_view name;
  std::uint64_t bytes;
};
constexpr ItemType kItemTypes[] = {{"bf16", 2},     {"fp16", 2}, {"fp32", 4}, {"fp8_e4m3", 1},
                                   {"fp8_e5m2", 1}, {"int8", 1}, {"uint8", 1}};

bool is_opaque_name(std::string_view name) noexcept {
  constexpr std::string_view kPrefix = "opaque.";
  if (!name.starts_with(kPrefix) || name.size() == kPrefix.size()) return false;
  name.remove_prefix(kPrefix.size());
  const auto alnum = [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); };
  return alnum(name[0]) && std::all_of(name.begin(), name.end(), [&](char c) {
           return alnum(c) || c == '_' || c == '.' || c == '-';
         });
}

/// "16" without sign, space or leading zero.
bool number(std::string_view word, std::uint64_t& out) noexcept {
  if (word.empty() || word[0] == '0') return false;
  const auto [end, failed] = std::from_chars(word.data(), word.data() + word.size(), out);
  return failed == std::errc{} && end == word.data() + word.size();
}

std::string quoted(std::string_view word) { return std::string("'").append(word).append("'"); }

bool parse_axis(std::string_view word, LayoutAxis& axis, std::string& error) {
  const std::size_t colon = word.find(':');
  const std::string_view name = word.substr(0, colon);
  const auto known = std::find(kDimNames.begin(), kDimNames.end(), name);
  std::string_view sizes = colon == word.npos ? std::string_view{} : word.substr(colon + 1);
  const std::size_t at = sizes.find('@');
  axis.step = 1;
  if (!number(sizes.substr(0, at), axis.size) ||
      (at != sizes.npos && !number(sizes.substr(at + 1), axis.step))) {
    error = "axis " + quoted(word) + " is not 'dim:size' or 'dim:size@step'";
    return false;
  }
  if (known == kDimNames.end()) {
    error = "unknown dimension " + quoted(name) + "; known are layer, kv, token, head, elem";
    return false;
  }
  axis.dim = static_cast<Dim>(known - kDimNames.begin());
  return true;
}

bool parse_axes(std::string_view text, std::vector<LayoutAxis>& out, std::string& error) {
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    LayoutAxis axis;
    if (!parse_axis(text.substr(0, comma), axis, error)) return false;
    if (out.size() == kMaxAxes) {
      error = "more than " + std::to_string(kMaxAxes) + " axes";
      return false;
    }
    out.push_back(axis);
    if (comma == text.npos) return true;
    text.remove_prefix(comma + 1);
    if (text.empty()) {
      error = "an axis is missing behind the last comma";
      return false;
    }
  }
  return true;
}

/// Without axes of size 1, and with `token:4@16,token:16` written as `token:64`.
void join(std::vector<LayoutAxis>& axes) {
  std::vector<LayoutAxis> out;
  for (const LayoutAxis& axis : axes) {
    if (axis.size == 1) continue;
    if (!out.empty() && out.back().dim == axis.dim && out.back().step == axis.step * axis.size) {
      out.back() = {axis.dim, out.back().size * axis.size, axis.step};
    } else {
      out.push_back(axis);
    }
  }
  axes = std::move(out);
}

/// The axes of a dimension are its digits: each step is the product of the smaller ones' sizes.
bool check_covered(Dim dim, std::vector<LayoutAxis> axes, std::string& error) {
  std::erase_if(axes, [dim](const LayoutAxis& a) { return a.dim != dim; });
  std::sort(axes.begin(), axes.end(), [](const auto& a, const auto& b) { return a.step < b.step; });
  std::uint64_t expected = 1;
  for (const LayoutAxis& axis : axes) {
    const std::string name = kDimNames[static_cast<std::size_t>(dim)];
    if (axis.step != expected) {
      error = "axis " + name + ":" + std::to_string(axis.size) + "@" + std::to_string(axis.step) +
              " should step by " + std::to_string(expected) + "; the axes of " + quoted(name) +
              " must count each of its indices exactly once";
      return false;
    }
    expected *= axis.size;
  }
  return true;
}

std::uint64_t product(const std::vector<LayoutAxis>& axes) noexcept {
  std::uint64_t n = 1;
  for (const LayoutAxis& axis : axes) n *= axis.size;
  return n;
}

/// Every product of sizes and steps below stays within 63 bits once this holds.
bool bounded(const std::vector<LayoutAxis>& axes, std::uint64_t& bytes) noexcept {
  for (const LayoutAxis& axis : axes) {
    if (axis.size > kMaxBytes / bytes || axis.step > kMaxBytes) return false;
    bytes *= axis.size;
  }
  return true;
}

std::string axes_text(const std::vector<LayoutAxis>& axes) {
  std::string out;
  for (const LayoutAxis& axis : axes) {
    if (!out.empty()) out += ',';
    out += kDimNames[static_cast<std::size_t>(axis.dim)];
    out += ':' + std::to_string(axis.size);
    if (axis.step != 1) out += '@' + std::to_string(axis.step);
  }
  return out;
}

}  // namespace

std::optional<Layout> Layout::parse(std::string_view text, std::string& error) {
  const auto refuse = [&](const std::string& why) {
    error = "layout " + quoted(text.substr(0, 200)) + ": " + why;
    return std::nullopt;
  };
  if (text.size() > kMaxText) return refuse("longer than 4096 characters");
  const std::size_t bar = text.find('|');
  if (bar == text.npos) return refuse("expected '<type>|<axis>,...'");
  Layout out;
  out.dtype_ = text.substr(0, bar);
  out.opaque_ = is_opaque_name(out.dtype_);
  const auto type = std::find_if(std::begin(kItemTypes), std::end(kItemTypes),
                                 [&](const ItemType& t) { return t.name == out.dtype_; });
  if (type == std::end(kItemTypes) && !out.opaque_) {
    return refuse("unknown element type " + quoted(out.dtype_) +
                  "; known are bf16, fp16, fp32, fp8_e4m3, fp8_e5m2, int8, uint8, opaque.<tag>");
  }
  out.item_bytes_ = out.opaque_ ? 1 : type->bytes;

  std::string_view rest = text.substr(bar + 1);
  std::string why;
  if (const std::size_t fork = rest.find("kv("); fork != rest.npos) {
    std::string_view both = rest.substr(fork + 3);
    const std::size_t half = both.find(';');
    if (half == both.npos || !both.ends_with(')')) {
      return refuse("expected 'kv(<axes of K>;<axes of V>)' at the end");
    }
    both.remove_suffix(1);
    if (!parse_axes(both.substr(0, half), out.inner_[0], why) ||
        !parse_axes(both.substr(half + 1), out.inner_[1], why)) {
      return refuse(why);
    }
    rest = rest.substr(0, fork);
    if (!rest.empty()) {
      if (!rest.ends_with(',')) return refuse("expected a comma before 'kv('");
      rest.remove_suffix(1);
      if (rest.empty()) return refuse("an axis is missing before 'kv('");
    }
    out.branched_ = true;
  }
  if (!parse_axes(rest, out.outer_, why)) return refuse(why);
  if (!out.check(why)) return refuse(why);
  out.canonicalise();
  out.write_text();
  return out;
}

bool Layout::check(std::string& error) {
  std::array<std::vector<LayoutAxis>, 2> whole{outer_, outer_};
  const std::size_t parts = branched_ ? 2 : 1;
  for (std::size_t i = 0; i < parts; ++i) {
    whole[i].insert(whole[i].end(), inner_[i].begin(), inner_[i].end());
    std::uint64_t bytes = item_bytes_;
    if (!bounded(whole[i], bytes)) {
      error = "describes more than 1 TiB";
      return false;
    }
    if (branched_ && std::any_of(whole[i].begin(), whole[i].end(),
                                 [](const LayoutAxis& a) { return a.dim == Dim::kKv; })) {
      error = "kv(...) and an axis of 'kv' exclude each other";
      return false;
    }
    total_bytes_ += bytes;
    std::erase_if(whole[i], [](const LayoutAxis& a) { return a.size == 1; });
    for (std::size_t dim = 0; dim < kDimNames.size(); ++dim) {
      if (!check_covered(static_cast<Dim>(dim), whole[i], error)) return false;
    }
  }
  if (!branched_) return true;
  for (const Dim dim : {Dim::kLayer, Dim::kToken, Dim::kHead}) {
    if (total(dim, 0) == total(dim, 1)) continue;
    error = "K has " + std::to_string(total(dim, 0)) + " of " +
            quoted(kDimNames[static_cast<std::size_t>(dim)]) + ", V " +
            std::to_string(total(dim, 1));
    return false;
  }
  return true;
}

void Layout::canonicalise() {
  join(inner_[0]);
  join(inner_[1]);
  if (branched_ && inner_[0] == inner_[1]) {
    branched_ = false;
    outer_.push_back({Dim::kKv, 2, 1});
    outer_.insert(outer_.end(), inner_[0].begin(), inner_[0].end());
    inner_[0].clear();
    inner_[1].clear();
  }
  join(outer_);
}

void Layout::write_text() {
  text_ = dtype_ + "|" + axes_text(outer_);
  if (!branched_) return;
  if (!outer_.empty()) text_ += ',';
  text_ += "kv(" + axes_text(inner_[0]) + ";" + axes_text(inner_[1]) + ")";
}

std::uint64_t Layout::total(Dim dim, std::size_t kv) const noexcept {
  if (branched_ && dim == Dim::kKv) return 2;
  std::uint64_t n = 1;
  for (const LayoutAxis& axis : outer_) n *= axis.dim == dim ? axis.size : 1;
  for (const LayoutAxis& axis : inner_[branched_ ? kv : 0]) n *= axis.dim == dim ? axis.size : 1;
  return n;
}

std::uint64_t Layout::shard_count() const noexcept {
  if (outer_.empty() || outer_[0].dim != Dim::kLayer) return 1;
  return outer_[0].size == total(Dim::kLayer) ? outer_[0].size : 1;
}

std::vector<Layout::Part> Layout::parts(std::uint64_t shard_align, bool split_kv) const {
  const std::uint64_t k_bytes = item_bytes_ * product(inner_[0]);
  const std::uint64_t v_bytes = branched_ ? item_bytes_ * product(inner_[1]) : 0;
  std::vector<Part> out(1);
  const auto place = [](Part& part, const std::vector<LayoutAxis>& axes, std::uint64_t stride) {
    for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
      part.axes.push_back({*axis, stride});
      stride *= axis->size;
    }
  };
  if (branched_) {
    out.resize(2);
    place(out[0], inner_[0], item_bytes_);
    place(out[1], inner_[1], item_bytes_);
    out[1].offset = k_bytes;
  }
  std::uint64_t stride = k_bytes + v_bytes;
  std::uint64_t kv_stride = 0;
  for (std::size_t i = outer_.size(); i-- > 0;) {
    if (i == 0 && shard_count() > 1) stride = align_up(stride, shard_align);
    if (outer_[i].dim == Dim::kKv && split_kv) {
      kv_stride = stride;
    } else {
      for (Part& part : out) part.axes.push_back({outer_[i], stride});
    }
    stride *= outer_[i].size;
  }
  // kv has at most one axis of two indices: K and V, nothing else is known under that name.
  for (std::uint64_t kv = 1; kv_stride != 0 && kv < total(Dim::kKv); ++kv) {
    out.push_back(out[0]);
    out.back().offset = kv * kv_stride;
  }
  return out;
}

std::uint64_t Layout::span_bytes(std::uint64_t shard_align) const noexcept {
  const std::uint64_t shards = shard_count();
  return shards == 1 ? total_bytes_ : shards * align_up(shard_bytes(), shard_align);
}

}  // namespace ucm
