#include "slab/allocator.h"

#include <fcntl.h>
#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "cache/futex.h"
#include "slab/aligned.h"
#include "slab/kill_points.h"

namespace ucm::slab {
namespace {

constexpr int kSweeps = 3;  // two that clear access bits, one that takes what it meets

/// Walks the groups of a class on one root in the order of the hand.
class Hand {
 public:
  Hand(Segment& segment, std::uint32_t c, std::uint32_t root) noexcept
      : segment_(segment),
        shape_(segment.geometry(c).shape),
        class_(c),
        first_(segment.header().root[root].first),
        extents_(segment.header().root[root].extents),
        place_(segment.header().hand[c][root]) {
    const std::uint64_t at = place_.load(std::memory_order_relaxed);
    extent_ = static_cast<std::uint32_t>(at >> 32) % std::max(extents_, 1u);
    group_ = static_cast<std::uint32_t>(at);
    start_extent_ = extent_;
    start_group_ = group_;
  }
  /// Next group, or kNone after one whole round.
  std::uint32_t next() noexcept {
    for (;;) {
      if (group_ >= shape_.groups || segment_.class_of_extent(first_ + extent_) != class_) {
        group_ = 0;
        extent_ = extent_ + 1 == extents_ ? 0 : extent_ + 1;
        if (++visited_ > extents_) return kNone;
        if (segment_.class_of_extent(first_ + extent_) != class_) continue;
      }
      if (visited_ == extents_ && extent_ == start_extent_ && group_ >= start_group_) return kNone;
      return (first_ + extent_) * segment_.header().group_stride + group_++;
    }
  }
  /// The group just returned stays the next one (it may have room left) or is passed.
  void keep(bool stay) noexcept {
    place_.store(std::uint64_t{extent_} << 32 | (stay ? group_ - 1 : group_),
                 std::memory_order_relaxed);
  }

 private:
  Segment& segment_;
  const SlabShape& shape_;
  const std::uint32_t class_;
  const std::uint32_t first_;
  const std::uint32_t extents_;
  Shared<std::uint64_t>& place_;
  std::uint32_t extent_;
  std::uint32_t group_;
  std::uint32_t start_extent_;
  std::uint32_t start_group_;
  std::uint32_t visited_ = 0;
};

bool closed(const Group& g) noexcept {
  const std::uint32_t until = g.closed_until.load(std::memory_order_relaxed);
  return until != 0 && cache::monotonic_seconds() < until;
}

}  // namespace

void compose_page(Segment& segment, std::uint32_t group, const std::vector<std::uint32_t>& writing,
                  std::byte* page) noexcept {
  std::memset(page, 0, kPage);
  const std::uint32_t e = segment.extent_of_group(group);
  const std::uint32_t c = segment.class_of_extent(e);
  if (c == kNone) return;
  const ClassRecord& record = segment.geometry(c);
  const std::uint32_t first = segment.first_slot(group, record.shape);
  const std::uint32_t n = record.shape.slots_of_group(group % segment.header().group_stride);
  for (std::uint32_t i = 0; i < n; ++i) {
    const SlotMeta& m = segment.meta(first + i);
    const Phase phase = phase_of(m);
    if (phase != Phase::kObject &&
        (phase != Phase::kWriting ||
         std::find(writing.begin(), writing.end(), first + i) == writing.end())) {
      continue;
    }
    SlotHead h{};
    h.magic = kSlotMagic;
    h.shards = record.shard_count;
    h.id = id_of(m);
    h.generation = m.generation.load(std::memory_order_relaxed);
    h.epoch = segment.extent(e).epoch.load(std::memory_order_relaxed);
    h.object_check = m.object_check.load(std::memory_order_relaxed);
    seal(h);
    std::memcpy(page + i * sizeof h, &h, sizeof h);
  }
}

bool Allocator::own(std::uint32_t group) noexcept {
  std::uint32_t none = 0;
  if (!segment().group(group).owner.compare_exchange_strong(none, segment().self() + 1))
    return false;
  segment().held.fetch_add(1);
  return true;
}

bool Allocator::own_mine(std::uint32_t group) noexcept {
  if (!own(group)) return false;
  // Since it was looked at its file may have been given another geometry; from here it cannot.
  if (segment().class_of_extent(segment().extent_of_group(group)) == index_.own_class())
    return true;
  (void)give_back(group);
  return false;
}

bool Allocator::give_back(std::uint32_t group) noexcept {
  Segment& s = segment();
  Group& g = s.group(group);
  const std::uint32_t c = s.class_of_extent(s.extent_of_group(group));
  if (c != kNone) {
    const SlabShape& shape = s.geometry(c).shape;
    const std::uint32_t first = s.first_slot(group, shape);
    const std::uint32_t n = shape.slots_of_group(group % s.header().group_stride);
    std::uint32_t free = 0;
    for (std::uint32_t i = 0; i < n; ++i) free += phase_of(s.meta(first + i)) == Phase::kFree;
    g.free.store(free);
  }
  g.owner.store(0);
  s.held.fetch_sub(1);
  return g.dirty.load() != 0;
}

void Allocator::collect_free(OwnedGroup& out) noexcept {
  Segment& s = segment();
  const SlabShape& shape = index_.own_shape();
  const std::uint32_t first = s.first_slot(out.group, shape);
  const std::uint32_t n = shape.slots_of_group(out.group % s.header().group_stride);
  out.free.clear();
  // From the back, so that they are used in the order of the file.
  for (std::uint32_t i = n; i-- > 0;) {
    SlotMeta& m = s.meta(first + i);
    // Left behind by a reader that died.
    if (phase_of(m) == Phase::kDoomed && m.pins.load() == 0) set_phase(m, Phase::kFree);
    if (phase_of(m) == Phase::kFree) out.free.push_back(first + i);
  }
}

bool Allocator::free_group(std::uint32_t root, OwnedGroup& out) noexcept {
  Segment& s = segment();
  Hand hand(s, index_.own_class(), root);
  for (std::uint32_t g; (g = hand.next()) != kNone;) {
    Group& group = s.group(g);
    if (group.owner.load(std::memory_order_relaxed) != 0 || group.free.load() == 0 ||
        closed(group) || !own_mine(g)) {
      continue;
    }
    out.group = g;
    collect_free(out);
    if (!out.free.empty()) {
      out.page_first = group.dirty.load() != 0;
      hand.keep(true);
      return true;
    }
    (void)give_back(g);
  }
  return false;
}

bool Allocator::cold_group(std::uint32_t root, std::uint32_t wanted, OwnedGroup& out) noexcept {
  Segment& s = segment();
  const SlabShape& shape = index_.own_shape();
  for (int sweep = 0; sweep < kSweeps; ++sweep) {
    Hand hand(s, index_.own_class(), root);
    for (std::uint32_t g; (g = hand.next()) != kNone;) {
      Group& group = s.group(g);
      if (group.owner.load(std::memory_order_relaxed) != 0 || closed(group)) continue;
      const std::uint32_t first = s.first_slot(g, shape);
      const std::uint32_t n = shape.slots_of_group(g % s.header().group_stride);
      // Victims are those that were cold before this visit, not those that it makes cold.
      std::uint32_t victims[kMaxGroupSlots];
      std::uint32_t cold = 0;
      for (std::uint32_t i = 0; i < n; ++i) {
        SlotMeta& m = s.meta(first + i);
        if (phase_of(m) != Phase::kObject || m.pins.load(std::memory_order_relaxed) != 0) continue;
        if (sweep == kSweeps - 1 || m.access.load(std::memory_order_relaxed) == 0) {
          victims[cold++] = first + i;
        } else {
          m.access.store(0, std::memory_order_relaxed);
        }
      }
      hand.keep(false);
      // A page is written twice per group, whatever is won: leave one that yields little.
      if (cold == 0 || (sweep < kSweeps - 1 && cold * 2 < n) || !own_mine(g)) continue;
      segment().point(point::kGroupTaken);
      // Another writer has given it back since: what is free in it costs nobody anything.
      out.group = g;
      collect_free(out);
      if (!out.free.empty()) {
        out.page_first = group.dirty.load() != 0;
        return true;
      }
      std::uint32_t left = std::max(wanted, 1u);
      for (std::uint32_t i = 0; i < cold && left > 0; ++i) {
        if (!index_.evict(victims[i])) continue;
        s.geometry(index_.own_class()).evictions.fetch_add(1, std::memory_order_relaxed);
        --left;
      }
      group.dirty.store(1);
      segment().point(point::kEvicted);
      collect_free(out);
      if (!out.free.empty()) {
        out.page_first = true;
        return true;
      }
      (void)give_back(g);
    }
  }
  return false;
}

int Allocator::format(std::uint32_t e) noexcept {
  Segment& s = segment();
  const posix::Format& format = core_.format;
  const Geometry& geometry = format.geometry();
  const SlabShape& shape = index_.own_shape();
  const std::uint32_t root = s.root_of(e);
  const std::uint32_t number = s.number_of(e);
  segment().point(point::kFormatting);
  Aligned page(shape.head_bytes);
  if (page.data == nullptr) return ENOMEM;
  std::memset(page.data, 0, shape.head_bytes);
  SlabHead h{};
  h.magic = kSlabMagic;
  h.version = kSlabVersion;
  h.number = number;
  h.slab_bytes = s.header().slab_bytes;
  h.slot_bytes = shape.slot_bytes;
  h.shard_bytes = geometry.shard_bytes;
  h.shard_count = geometry.shard_count;
  h.slots = shape.slots;
  h.group_slots = shape.group_slots;
  h.layout_bytes = static_cast<std::uint32_t>(geometry.layout.size());
  h.root = s.header().root[root].id;
  h.namespace_digest = format.namespace_digest();
  if (getrandom(&h.epoch, sizeof h.epoch, 0) != sizeof h.epoch || h.epoch == 0) {
    h.epoch = s.header().generation.fetch_add(1) + 1;
  }
  h.layout_hash = format.layout_hash();
  seal(h);
  std::memcpy(page.data, &h, sizeof h);
  std::memcpy(page.data + sizeof h, geometry.layout.data(), geometry.layout.size());
  const std::string path = s.files().path(root, number);
  std::size_t bytes = shape.head_bytes;
  if (core_.options.faults) [[unlikely]] {
    if (const int r = core_.options.faults->before(IoStep::kWrite, path.c_str(), bytes); r < 0)
      return -r;
  }
  const int fd = s.files().fd(root, number, core_.roots[root]->direct());
  if (fd < 0) return -fd;
  const ssize_t n = ::pwrite(fd, page.data, shape.head_bytes, 0);
  if (n != static_cast<ssize_t>(shape.head_bytes)) return n < 0 ? errno : EIO;
  if (core_.options.fsync && ::fdatasync(fd) < 0) return errno;
  segment().point(point::kFormatted);
  const std::uint32_t slots = s.header().slot_stride;
  for (std::uint32_t i = 0; i < slots; ++i) {
    SlotMeta& m = s.meta(e * slots + i);
    m.pins.store(0, std::memory_order_relaxed);
    m.access.store(0, std::memory_order_relaxed);
    set_phase(m, Phase::kFree);
  }
  for (std::uint32_t i = 0; i < s.header().group_stride; ++i) {
    Group& g = s.group(e * s.header().group_stride + i);
    g.dirty.store(0);
    g.closed_until.store(0);
    g.free.store(i < shape.groups ? shape.slots_of_group(i) : 0);
  }
  s.extent(e).epoch.store(h.epoch);
  return 0;
}

bool Allocator::fresh_extent(std::uint32_t root, int& error) noexcept {
  Segment& s = segment();
  const RootRecord& r = s.header().root[root];
  for (std::uint32_t e = r.first; e < r.first + r.extents; ++e) {
    std::uint32_t none = extent_state(ExtentState::kFree, 0);
    if (!s.extent(e).state.compare_exchange_strong(
            none, extent_state(ExtentState::kFormatting, s.self()))) {
      continue;
    }
    error = format(e);
    s.extent(e).state.store(error == 0 ? extent_state(ExtentState::kClass, index_.own_class())
                                       : extent_state(ExtentState::kFree, 0),
                            std::memory_order_release);
    return error == 0;
  }
  return false;
}

std::uint32_t Allocator::wanting_donor(std::uint32_t root) const noexcept {
  Segment& s = segment();
  const RootRecord& r = s.header().root[root];
  std::uint32_t count[kMaxClasses] = {};
  for (std::uint32_t e = r.first; e < r.first + r.extents; ++e) {
    if (const std::uint32_t c = s.class_of_extent(e); c != kNone) ++count[c];
  }
  std::uint32_t donor = kNone, classes = 0;
  for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
    if (count[c] == 0 && c != index_.own_class()) continue;
    ++classes;
    if (c != index_.own_class() && count[c] > 1 && (donor == kNone || count[c] > count[donor])) {
      donor = c;
    }
  }
  if (donor == kNone) return kNone;
  // Who has less than half of its fair share takes from who has the most.
  const std::uint32_t own = count[index_.own_class()];
  const bool starved = own == 0 || own * 2 * classes < r.extents;
  return starved && count[donor] > own + 1 ? donor : kNone;
}

bool Allocator::steal_extent(std::uint32_t root, int& error) noexcept {
  if (wanting_donor(root) == kNone) return false;
  Segment& s = segment();
  // One at a time: several that are as hungry would each take a file, and leave the donor none.
  const std::scoped_lock one(s.stealing(root));
  const std::uint32_t donor = wanting_donor(root);
  if (donor == kNone) return true;  // another thread has just taken what was wanted
  const RootRecord& r = s.header().root[root];
  const SlabShape& shape = s.geometry(donor).shape;
  for (std::uint32_t e = r.first; e < r.first + r.extents; ++e) {
    if (s.class_of_extent(e) != donor) continue;
    const std::uint32_t first_group = e * s.header().group_stride;
    std::uint32_t owned = 0;
    while (owned < shape.groups && !closed(s.group(first_group + owned)) &&
           own(first_group + owned)) {
      ++owned;
    }
    bool all = owned == shape.groups && s.class_of_extent(e) == donor;
    // One object in use keeps the file where it is: then nothing of it is given up for it.
    for (std::uint32_t i = 0; all && i < shape.slots; ++i) {
      const SlotMeta& m = s.meta(e * s.header().slot_stride + i);
      all = phase_of(m) == Phase::kFree || (phase_of(m) == Phase::kObject && m.pins.load() == 0);
    }
    for (std::uint32_t i = 0; all && i < shape.slots; ++i) {
      SlotMeta& m = s.meta(e * s.header().slot_stride + i);
      if (phase_of(m) == Phase::kObject && index_.evict(e * s.header().slot_stride + i)) {
        s.geometry(donor).evictions.fetch_add(1, std::memory_order_relaxed);
        s.group(first_group + i / shape.group_slots).dirty.store(1);
      }
      all = phase_of(m) == Phase::kFree;
    }
    if (!all) {  // something is read or written: what was given up is free, in its old class
      for (std::uint32_t g = 0; g < owned; ++g) (void)give_back(first_group + g);
      continue;
    }
    s.extent(e).state.store(extent_state(ExtentState::kFormatting, s.self()));
    error = format(e);
    s.extent(e).state.store(error == 0 ? extent_state(ExtentState::kClass, index_.own_class())
                                       : extent_state(ExtentState::kFree, 0),
                            std::memory_order_release);
    for (std::uint32_t g = 0; g < owned; ++g) s.group(first_group + g).owner.store(0);
    s.held.fetch_sub(owned);
    return error == 0;
  }
  return false;
}

bool Allocator::take(std::uint32_t root, std::uint32_t wanted, OwnedGroup& out,
                     int& error) noexcept {
  error = 0;
  try {
    out.free.reserve(kMaxGroupSlots);
    if (free_group(root, out)) return true;
    if (fresh_extent(root, error) && free_group(root, out)) return true;
    if (error != 0) return false;
    if (steal_extent(root, error) && free_group(root, out)) return true;
    if (error != 0) return false;
    return cold_group(root, wanted, out);
  } catch (...) {
    error = ENOMEM;
    return false;
  }
}

std::uint64_t Allocator::begin(std::uint32_t slot, const BlockId& id) noexcept {
  SlotMeta& m = segment().meta(slot);
  std::uint64_t words[2];
  split(id, words);
  const std::uint64_t generation = segment().header().generation.fetch_add(1) + 1;
  set_phase(m, Phase::kWriting);
  m.id[0].store(words[0], std::memory_order_relaxed);
  m.id[1].store(words[1], std::memory_order_relaxed);
  m.pins.store(0, std::memory_order_relaxed);
  m.generation.store(generation, std::memory_order_relaxed);
  return generation;
}

}  // namespace ucm::slab
