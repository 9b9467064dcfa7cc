// Other writers' layouts of our objects: which of them can be read, and how.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "ucm/geometry.h"
#include "ucm/layout.h"

namespace ucm::posix {

/// A layout found in files that this reader can turn into its own.
struct ForeignLayout {
  Geometry geometry;      ///< shards and descriptor as the writer had them
  Conversion conversion;  ///< from the writer's object to the reader's
  std::uint64_t file_bytes = 0;
};

/// What was learnt about the layouts in the files of one namespace. Thread-safe; entries stay where
/// they are until the end. Bounded: the layouts beyond kMax are misses.
class ForeignLayouts {
 public:
  static constexpr std::size_t kMax = 16;

  /// `reader`: the geometry to convert to; without a descriptor that describes it nothing converts.
  explicit ForeignLayouts(const Geometry& reader);

  /// The conversion from objects of `shard_count` x `shard_bytes` in the order `text`, or null.
  /// `header_bytes`: what lies before the data in such a file.
  [[nodiscard]] const ForeignLayout* find(std::string_view text, std::uint32_t shard_count,
                                          std::uint64_t shard_bytes, std::uint64_t header_bytes);

  /// Could a file of this size hold our object in another layout? Says no to most others.
  [[nodiscard]] bool plausible(std::uint64_t file_bytes) const noexcept;

  /// Is this the size of files that were already found convertible?
  [[nodiscard]] bool known_size(std::uint64_t file_bytes) const noexcept;

 private:
  struct Entry {
    std::string text;
    std::uint32_t shard_count;
    std::uint64_t shard_bytes;
    std::optional<ForeignLayout> layout;  ///< empty: asked before, cannot be converted
  };

  std::optional<Layout> reader_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Entry>> entries_;
  std::atomic<std::uint64_t> sizes_[kMax]{};  ///< of convertible files; 0: unused
};

}  // namespace ucm::posix
