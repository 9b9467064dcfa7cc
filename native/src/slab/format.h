// The bytes of a slab file. Little-endian, every offset a multiple of kIoAlign.
//
//   [0, head_bytes)      SlabHead, the layout descriptor, zeros
//   head_bytes           one page per group of slots: a SlotHead for each slot of the group
//   data_offset          the slots; each is byte for byte what a file of the layout `file` is: header
//                        with a checksum per shard, then the shards at aligned offsets
//
// All slot heads stand together, so that a scan reads what the file holds in one go. A slot holds an
// object when its head is sound and of the file's epoch; the slot's own header then has to agree (id,
// generation), and each shard has to match its checksum.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "posix/format.h"
#include "ucm/block_id.h"
#include "ucm/geometry.h"

namespace ucm::slab {

inline constexpr std::array<char, 8> kSlabMagic{'U', 'C', 'M', 'S', 'L', 'A', 'B', '\n'};
inline constexpr std::uint32_t kSlotMagic = 0x544f4c53;  // "SLOT"
inline constexpr std::uint32_t kSlabVersion = 1;
inline constexpr std::size_t kPage = kIoAlign;

struct SlabHead {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::uint32_t number;  ///< of the file within its root
  std::uint64_t slab_bytes;
  std::uint64_t slot_bytes;
  std::uint64_t shard_bytes;
  std::uint32_t shard_count;
  std::uint32_t slots;
  std::uint32_t group_slots;
  std::uint32_t layout_bytes;
  BlockId root;  ///< identity of the root directory
  std::array<std::uint8_t, 32> namespace_digest;
  std::uint64_t epoch;  ///< of this geometry in this file; heads of another epoch mean nothing
  std::uint64_t layout_hash;
  std::uint64_t check;  ///< over all before it
};
static_assert(sizeof(SlabHead) == 128);

struct SlotHead {
  std::uint32_t magic;
  std::uint32_t shards;  ///< present ones: objects are written whole, so all of them
  BlockId id;
  std::uint64_t generation;
  std::uint64_t epoch;
  std::uint64_t object_check;  ///< check of the slot's own header
  std::uint64_t reserved;
  std::uint64_t check;  ///< over all before it
};
static_assert(sizeof(SlotHead) == 64);
inline constexpr std::uint32_t kMaxGroupSlots = kPage / sizeof(SlotHead);

/// Where things are in a slab file of one geometry.
struct SlabShape {
  std::uint64_t slot_bytes = 0;
  std::uint64_t head_bytes = 0;
  std::uint64_t data_offset = 0;
  std::uint32_t group_slots = 0;
  std::uint32_t groups = 0;
  std::uint32_t slots = 0;

  /// At most `max_slots` slots and `max_groups` groups. All zero when not even one slot fits.
  static SlabShape fit(std::uint64_t slab_bytes, std::uint64_t slot_bytes, std::size_t layout_bytes,
                       std::uint32_t max_slots, std::uint32_t max_groups) noexcept;
  /// Least size of a slab file with `slots` slots.
  static std::uint64_t bytes_for(std::uint64_t slot_bytes, std::size_t layout_bytes,
                                 std::uint32_t slots) noexcept;

  [[nodiscard]] std::uint64_t group_offset(std::uint32_t group) const noexcept {
    return head_bytes + std::uint64_t{group} * kPage;
  }
  [[nodiscard]] std::uint64_t slot_offset(std::uint32_t slot) const noexcept {
    return data_offset + std::uint64_t{slot} * slot_bytes;
  }
  [[nodiscard]] std::uint32_t slots_of_group(std::uint32_t group) const noexcept {
    const std::uint32_t first = group * group_slots;
    return slots - first < group_slots ? slots - first : group_slots;
  }
};

[[nodiscard]] std::uint64_t hash_of(const void* data, std::size_t n) noexcept;
void seal(SlabHead& head) noexcept;
[[nodiscard]] bool sound(const SlabHead& head) noexcept;
void seal(SlotHead& head) noexcept;
[[nodiscard]] bool sound(const SlotHead& head) noexcept;

}  // namespace ucm::slab
