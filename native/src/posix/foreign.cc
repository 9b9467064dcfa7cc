#include "posix/foreign.h"

#include <algorithm>

namespace ucm::posix {
namespace {

/// The descriptor, if it describes objects of this shape.
std::optional<Layout> describing(std::string_view text, std::uint64_t shard_count,
                                 std::uint64_t shard_bytes) {
  std::string error;
  auto layout = Layout::parse(text, error);
  if (!layout || layout->shard_count() != shard_count || layout->shard_bytes() != shard_bytes) {
    return std::nullopt;
  }
  return layout;
}

}  // namespace

ForeignLayouts::ForeignLayouts(const Geometry& reader)
    : reader_(describing(reader.layout, reader.shard_count, reader.shard_bytes)) {}

const ForeignLayout* ForeignLayouts::find(std::string_view text, std::uint32_t shard_count,
                                          std::uint64_t shard_bytes, std::uint64_t header_bytes) {
  if (!reader_) return nullptr;
  std::scoped_lock lock(mutex_);
  for (const auto& e : entries_) {
    if (e->shard_count == shard_count && e->shard_bytes == shard_bytes && e->text == text) {
      return e->layout ? &*e->layout : nullptr;
    }
  }
  if (entries_.size() == kMax) return nullptr;
  auto entry = std::make_unique<Entry>(std::string(text), shard_count, shard_bytes, std::nullopt);
  if (const auto source = describing(text, shard_count, shard_bytes)) {
    std::string why_not;
    auto conversion = Conversion::plan(*source, *reader_, kIoAlign, kIoAlign, why_not);
    if (conversion) {
      Geometry g;
      g.shard_count = shard_count;
      g.shard_bytes = shard_bytes;
      g.layout = text;
      const std::uint64_t bytes = header_bytes + g.object_bytes();
      entry->layout.emplace(ForeignLayout{std::move(g), *std::move(conversion), bytes});
      sizes_[entries_.size()].store(bytes, std::memory_order_release);
    }
  }
  entries_.push_back(std::move(entry));
  const auto& made = entries_.back()->layout;
  return made ? &*made : nullptr;
}

bool ForeignLayouts::plausible(std::uint64_t file_bytes) const noexcept {
  // The same elements between headers and paddings of other sizes.
  return reader_ && file_bytes % kIoAlign == 0 && file_bytes > reader_->total_bytes() &&
         file_bytes - reader_->total_bytes() <= kIoAlign * (1 + reader_->total(Dim::kLayer));
}

bool ForeignLayouts::known_size(std::uint64_t file_bytes) const noexcept {
  return std::any_of(std::begin(sizes_), std::end(sizes_), [file_bytes](const auto& size) {
    return size.load(std::memory_order_acquire) == file_bytes;
  });
}

}  // namespace ucm::posix
