// Slots for new objects: free ones, then files without a geometry, then what CLOCK gives up.
#pragma once

#include <cstdint>
#include <vector>

#include "slab/index.h"

namespace ucm::slab {

/// A group that this process owns for a while: nobody else takes slots of it or writes its page.
struct OwnedGroup {
  std::uint32_t group = kNone;
  std::vector<std::uint32_t> free;  ///< slots; the caller uses them up
  bool page_first =
      false;  ///< the medium still calls free slots used: write the page before any data
};

/// What the page of a group says, from the slots as they are. `writing`: slots in phase kWriting that
/// count as objects, their data being on the medium. `page` has kPage bytes.
void compose_page(Segment& segment, std::uint32_t group, const std::vector<std::uint32_t>& writing,
                  std::byte* page) noexcept;

/// Thread-safe. Allocates for one geometry class.
class Allocator {
 public:
  Allocator(Index& index, const posix::Core& core) : index_(index), core_(core) {}

  /// A group on `root` with free slots; up to `wanted` objects are given up for it. False: everything is
  /// being read or written, or the medium fails (`error`). May write the head of a slab file.
  [[nodiscard]] bool take(std::uint32_t root, std::uint32_t wanted, OwnedGroup& out,
                          int& error) noexcept;
  /// True: its page is out of date, somebody has to write it.
  bool give_back(std::uint32_t group) noexcept;
  /// Owns a group whatever is in it; false: another one has it.
  [[nodiscard]] bool own(std::uint32_t group) noexcept;

  /// Marks a slot of an owned group as being filled with `id`. Returns its generation.
  std::uint64_t begin(std::uint32_t slot, const BlockId& id) noexcept;

 private:
  [[nodiscard]] bool own_mine(std::uint32_t group) noexcept;
  [[nodiscard]] bool free_group(std::uint32_t root, OwnedGroup& out) noexcept;
  [[nodiscard]] bool cold_group(std::uint32_t root, std::uint32_t wanted, OwnedGroup& out) noexcept;
  [[nodiscard]] bool fresh_extent(std::uint32_t root, int& error) noexcept;
  [[nodiscard]] bool steal_extent(std::uint32_t root, int& error) noexcept;
  [[nodiscard]] std::uint32_t wanting_donor(std::uint32_t root) const noexcept;
  [[nodiscard]] int format(std::uint32_t extent) noexcept;
  void collect_free(OwnedGroup& out) noexcept;
  [[nodiscard]] Segment& segment() const noexcept { return index_.segment(); }

  Index& index_;
  const posix::Core& core_;
};

}  // namespace ucm::slab
