// Layout descriptors: in which order the bytes of an object lie, and how one order becomes another.
//
// An object is engine-native bytes of one group at one coordinate. Its logical dimensions are layer,
// kv (K, V), token (entries of a block), head and elem (elements of a head). A descriptor lists axes,
// outermost first; a dimension may be split over several axes, each with the number of logical steps
// that one index of it takes. K and V may be ordered differently below a common outer part. Text form:
//
//   bf16|token:4@16,kv:2,token:16,head:8,elem:64       four pages of 16 tokens, each K then V
//   fp32|layer:2,head:4,kv(elem:8,token:32;token:32,elem:8)   K stored transposed, V as rows
//
// A dimension that is not named has size 1. Bytes whose inner order is not described have the element
// type `opaque.<tag>`, one byte each: they convert to nothing but themselves.
// docs/layouts.md draws the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ucm/convert.h"

namespace ucm {

enum class Dim : std::uint8_t { kLayer, kKv, kToken, kHead, kElem };
inline constexpr std::array<const char*, 5> kDimNames{"layer", "kv", "token", "head", "elem"};

/// `size` indices of `dim`, each `step` logical units apart.
struct LayoutAxis {
  Dim dim = Dim::kElem;
  std::uint64_t size = 1;
  std::uint64_t step = 1;
  friend bool operator==(const LayoutAxis&, const LayoutAxis&) = default;
};

/// A checked descriptor in canonical form: axes of size 1 are gone, neighbours that are one axis are
/// joined, so two descriptors of one order are equal and have one text. Immutable.
class Layout {
 public:
  /// Where the elements of K or of V lie: the axes with their distances, and where the part begins.
  struct Placed {
    LayoutAxis axis;
    std::uint64_t stride = 0;  ///< bytes between neighbours
  };
  struct Part {
    std::uint64_t offset = 0;
    std::vector<Placed> axes;
  };

  /// Returns nullopt and sets `error` (what, where, expected) for text that is no descriptor.
  [[nodiscard]] static std::optional<Layout> parse(std::string_view text, std::string& error);

  [[nodiscard]] const std::string& text() const noexcept { return text_; }
  [[nodiscard]] const std::string& dtype() const noexcept { return dtype_; }
  [[nodiscard]] bool opaque() const noexcept { return opaque_; }
  [[nodiscard]] std::uint64_t item_bytes() const noexcept { return item_bytes_; }
  [[nodiscard]] std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  /// Size of a logical dimension, of K (0) or V (1) where their head sizes differ.
  [[nodiscard]] std::uint64_t total(Dim dim, std::size_t kv = 0) const noexcept;
  /// One shard a layer when layers lie outermost, else the object is one shard.
  [[nodiscard]] std::uint64_t shard_count() const noexcept;
  [[nodiscard]] std::uint64_t shard_bytes() const noexcept { return total_bytes_ / shard_count(); }
  /// K and V have inner orders of their own.
  [[nodiscard]] bool branched() const noexcept { return branched_; }

  /// Shards start at multiples of `shard_align`. `split_kv`: one part for K and one for V (of an
  /// object that has both), without kv axes; else one part, which a branched layout does not have.
  [[nodiscard]] std::vector<Part> parts(std::uint64_t shard_align, bool split_kv) const;
  /// Bytes from the first to behind the last, padding between shards included.
  [[nodiscard]] std::uint64_t span_bytes(std::uint64_t shard_align) const noexcept;

  friend bool operator==(const Layout& a, const Layout& b) noexcept { return a.text_ == b.text_; }

 private:
  Layout() = default;
  void canonicalise();
  bool check(std::string& error);
  void write_text();

  std::string text_;
  std::string dtype_;
  std::vector<LayoutAxis> outer_;
  std::array<std::vector<LayoutAxis>, 2> inner_;  ///< of K and V, when branched_
  std::uint64_t item_bytes_ = 1;
  std::uint64_t total_bytes_ = 0;
  bool opaque_ = false;
  bool branched_ = false;
};

/// How an object of one layout becomes the shards of another. Immutable once made, safe to share
/// between threads; running allocates nothing.
class Conversion {
 public:
  /// Shards of either side start at multiples of its alignment (kIoAlign inside stored objects).
  /// Returns nullopt and sets `why_not` when the two do not hold the same elements, or in splits that
  /// do not fit each other; the object is then a miss.
  [[nodiscard]] static std::optional<Conversion> plan(const Layout& source, const Layout& target,
                                                      std::uint64_t source_align,
                                                      std::uint64_t target_align,
                                                      std::string& why_not);

  /// Fills shards [begin, end) of `target` (a region of target_bytes()) from the whole object
  /// `source` (source_bytes()); other shards are not touched. The regions do not overlap.
  void run(std::byte* target, const std::byte* source, std::uint64_t begin,
           std::uint64_t end) const noexcept;

  [[nodiscard]] std::uint64_t source_bytes() const noexcept { return source_bytes_; }
  [[nodiscard]] std::uint64_t target_bytes() const noexcept { return target_bytes_; }
  [[nodiscard]] std::uint64_t target_shards() const noexcept { return shards_; }
  /// True when each target shard is one memory copy.
  [[nodiscard]] bool straight() const noexcept;

 private:
  /// The copies of K, of V, or of both, within one target shard.
  struct Piece {
    ConvertPlan plan;
    std::uint64_t target_offset;
    std::vector<std::uint64_t> source_of_shard;  ///< where the bytes of each target shard begin
  };

  std::vector<Piece> pieces_;
  std::uint64_t shards_ = 1;
  std::uint64_t target_stride_ = 0;
  std::uint64_t source_bytes_ = 0;
  std::uint64_t target_bytes_ = 0;
};

}  // namespace ucm
