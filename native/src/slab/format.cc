#include "slab/format.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>

namespace ucm::slab {
namespace {

/// Objects whose heads share a page are written by one process at a time, and a page is written twice
/// per batch: large enough to make that cheap, small enough that few objects are given up at once.
constexpr std::uint64_t kGroupBytes = 16u << 20;

std::uint64_t head_bytes_of(std::size_t layout_bytes) noexcept {
  return align_up(sizeof(SlabHead) + layout_bytes, kPage);
}

std::uint32_t group_slots_of(std::uint64_t slot_bytes) noexcept {
  return static_cast<std::uint32_t>(
      std::clamp<std::uint64_t>(kGroupBytes / slot_bytes, 1, kMaxGroupSlots));
}

}  // namespace

std::uint64_t hash_of(const void* data, std::size_t n) noexcept { return XXH3_64bits(data, n); }

SlabShape SlabShape::fit(std::uint64_t slab_bytes, std::uint64_t slot_bytes,
                         std::size_t layout_bytes, std::uint32_t max_slots,
                         std::uint32_t max_groups) noexcept {
  SlabShape s;
  const std::uint64_t head = head_bytes_of(layout_bytes);
  if (slot_bytes == 0 || slab_bytes < head + kPage + slot_bytes) return s;
  s.slot_bytes = slot_bytes;
  s.head_bytes = head;
  s.group_slots = group_slots_of(slot_bytes);
  const std::uint64_t room = slab_bytes - head;
  std::uint64_t n = room / slot_bytes;
  n = std::min<std::uint64_t>(n, max_slots);
  n = std::min<std::uint64_t>(n, std::uint64_t{max_groups} * s.group_slots);
  const auto pages = [&](std::uint64_t slots) {
    return (slots + s.group_slots - 1) / s.group_slots * kPage;
  };
  while (n > 0 && pages(n) + n * slot_bytes > room) --n;
  if (n == 0) return {};
  s.slots = static_cast<std::uint32_t>(n);
  s.groups = static_cast<std::uint32_t>(pages(n) / kPage);
  s.data_offset = head + std::uint64_t{s.groups} * kPage;
  return s;
}

std::uint64_t SlabShape::bytes_for(std::uint64_t slot_bytes, std::size_t layout_bytes,
                                   std::uint32_t slots) noexcept {
  const std::uint64_t per = group_slots_of(slot_bytes);
  return head_bytes_of(layout_bytes) + (slots + per - 1) / per * kPage + slots * slot_bytes;
}

void seal(SlabHead& head) noexcept { head.check = hash_of(&head, offsetof(SlabHead, check)); }

bool sound(const SlabHead& head) noexcept {
  return head.magic == kSlabMagic && head.version == kSlabVersion &&
         head.check == hash_of(&head, offsetof(SlabHead, check));
}

void seal(SlotHead& head) noexcept { head.check = hash_of(&head, offsetof(SlotHead, check)); }

bool sound(const SlotHead& head) noexcept {
  return head.magic == kSlotMagic && head.check == hash_of(&head, offsetof(SlotHead, check));
}

}  // namespace ucm::slab
