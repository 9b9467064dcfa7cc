// After a process died, at whatever instruction.
//
// Its locks are broken first; chains are whole at all times, so the others can go on at once. Then what
// it owned is looked at: groups whose slots it was filling, files it was formatting; and its pins are
// taken back. All steps can be repeated: a recoverer that dies is itself recovered from.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "cache/futex.h"
#include "cache/process.h"
#include "slab/segment.h"

namespace ucm::slab {
namespace {

std::uint32_t seconds(std::chrono::milliseconds t) noexcept {
  // One more: the clock is rounded down.
  return t.count() == 0 ? 0 : static_cast<std::uint32_t>((t.count() + 999) / 1000) + 1;
}

class Recovery {
 public:
  Recovery(Segment& segment, std::uint32_t dead, std::uint32_t quarantine_s) noexcept
      : segment_(segment),
        dead_(dead),
        bit_(std::uint64_t{1} << dead),
        closed_until_(cache::monotonic_seconds() + quarantine_s) {}

  /// False when a living process kept a lock for too long: to be tried again.
  bool run() noexcept {
    segment_.break_locks(dead_);
    for (std::uint32_t i = 0; i < segment_.header().buckets; ++i) {
      Bucket& bucket = segment_.buckets()[i];
      if (bucket.leaving.load() == 0) continue;
      const BucketLock lock(segment_, bucket);  // finishes what was begun
      if (!lock) return false;
    }
    for (std::uint32_t e = 0; e < segment_.header().extents; ++e) {
      if (!extent(e)) return false;
    }
    return true;
  }

 private:
  bool extent(std::uint32_t e) noexcept {
    const std::uint32_t stride = segment_.header().group_stride;
    std::uint32_t state = segment_.extent(e).state.load();
    const bool formatting = state == extent_state(ExtentState::kFormatting, dead_);
    const std::uint32_t c = segment_.class_of_extent(e);
    if (c != kNone) {
      const SlabShape& shape = segment_.geometry(c).shape;
      for (std::uint32_t i = 0; i < shape.slots; ++i) {
        if (!unpin(e * segment_.header().slot_stride + i, shape)) return false;
      }
      for (std::uint32_t i = 0; i < shape.groups; ++i) {
        if (!group(e * stride + i, shape)) return false;
      }
    } else if (formatting) {
      // All its slots were free when it began. What its head says now decides at the next scan; until
      // then the file has no geometry.
      for (std::uint32_t i = 0; i < stride; ++i) {
        std::uint32_t owner = dead_ + 1;
        (void)segment_.group(e * stride + i).owner.compare_exchange_strong(owner, 0);
      }
      segment_.extent(e).state.compare_exchange_strong(state, extent_state(ExtentState::kFree, 0));
    }
    return true;
  }

  bool unpin(std::uint32_t slot, const SlabShape& shape) noexcept {
    SlotMeta& m = segment_.meta(slot);
    if ((m.pins.load(std::memory_order_relaxed) & bit_) == 0) return true;
    Bucket& bucket = segment_.bucket(id_of(m));
    BucketLock lock(segment_, bucket);
    if (!lock) return false;
    const std::uint64_t left = m.pins.fetch_and(~bit_) & ~bit_;
    if (left == 0 && phase_of(m) == Phase::kDoomed) {
      set_phase(m, Phase::kFree);
      segment_.group(segment_.group_of(slot, shape)).free.fetch_add(1);
    }
    return true;
  }

  bool group(std::uint32_t g, const SlabShape& shape) noexcept {
    Group& group = segment_.group(g);
    if (group.owner.load() != dead_ + 1) return true;
    const std::uint32_t first = segment_.first_slot(g, shape);
    const std::uint32_t n = shape.slots_of_group(g % segment_.header().group_stride);
    std::uint32_t free = 0;
    for (std::uint32_t i = 0; i < n; ++i) {
      SlotMeta& m = segment_.meta(first + i);
      if (phase_of(m) == Phase::kWriting) {
        // In a chain if it died while linking; the id is whole then.
        Bucket& bucket = segment_.bucket(id_of(m));
        BucketLock lock(segment_, bucket);
        if (!lock) return false;
        (void)lock.unlink(first + i);
        set_phase(m, Phase::kFree);
      }
      free += phase_of(m) == Phase::kFree;
    }
    // Its last writes may still land: of data into these slots, of a page that says something old.
    group.closed_until.store(closed_until_);
    group.dirty.store(1);
    group.free.store(free);
    group.owner.store(0);
    return true;
  }

  Segment& segment_;
  const std::uint32_t dead_;
  const std::uint64_t bit_;
  const std::uint32_t closed_until_;
};

}  // namespace

LeftBehind left_behind(int fd) {
  LeftBehind left;
  Header h{};
  const auto boot = cache::boot_id();
  if (::pread(fd, static_cast<void*>(&h), sizeof h, 0) != sizeof h ||
      std::memcmp(h.magic, kSegmentMagic, sizeof kSegmentMagic) != 0 ||
      h.version != kSegmentVersion || !std::equal(boot.begin(), boot.end(), h.boot_id)) {
    return left;
  }
  left.slab_bytes = h.slab_bytes;
  left.extents = h.extents;
  left.group_stride = h.group_stride;
  const std::uint64_t at =
      align_up(sizeof(Header), kPage) + align_up(sizeof(ExtentRecord) * h.extents, kPage);
  const std::uint32_t all = h.extents * h.group_stride;
  std::vector<Group> some(4096);
  for (std::uint32_t first = 0; first < all; first += 4096) {
    const std::size_t n = std::min<std::size_t>(all - first, some.size());
    const auto bytes = static_cast<ssize_t>(n * sizeof(Group));
    if (::pread(fd, static_cast<void*>(some.data()), n * sizeof(Group),
                static_cast<off_t>(at + first * sizeof(Group))) != bytes) {
      break;
    }
    for (std::uint32_t i = 0; i < n; ++i) {
      if (some[i].owner.load() != 0) left.groups.push_back(first + i);
    }
  }
  return left;
}

void close_left_behind(Segment& segment, const LeftBehind& left,
                       std::chrono::milliseconds quarantine) noexcept {
  const Header& h = segment.header();
  if (left.slab_bytes != h.slab_bytes || left.extents != h.extents ||
      left.group_stride != h.group_stride) {
    return;
  }
  for (const std::uint32_t g : left.groups) {
    segment.group(g).closed_until.store(cache::monotonic_seconds() + seconds(quarantine));
    segment.group(g).dirty.store(1);
  }
}

std::uint32_t recover_dead(Segment& segment, std::chrono::milliseconds quarantine) noexcept {
  std::uint32_t done = 0;
  for (std::uint32_t p = 0; p < kMaxProcesses; ++p) {
    if (segment.header().process[p].used.load(std::memory_order_acquire) == 0 || segment.alive(p) ||
        !segment.begin_recovery(p)) {
      continue;
    }
    const bool ok = Recovery(segment, p, seconds(quarantine)).run();
    segment.end_recovery(p, ok);
    if (!ok) continue;
    segment.header().recovered.fetch_add(1, std::memory_order_relaxed);
    ++done;
  }
  return done;
}

}  // namespace ucm::slab
