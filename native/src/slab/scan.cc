// The index from the heads of all slots, read file by file in one go each.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <vector>

#include "slab/aligned.h"
#include "slab/segment.h"

namespace ucm::slab {
namespace {

constexpr std::size_t kChunk = 4u << 20;

class Scan {
 public:
  Scan(Segment& segment, posix::Core& core) : segment_(segment), core_(core), buffer_(kChunk) {
    if (buffer_.data == nullptr) throw std::bad_alloc();
  }

  void run() {
    for (std::uint32_t e = 0; e < segment_.header().extents; ++e) {
      const int error = extent(e);
      if (error == 0) continue;
      // One bad file is not a bad directory: the others serve.
      core_.errors.add("scan", path(e), error, "this file is not used");
      segment_.extent(e).state.store(extent_state(ExtentState::kBroken, 0));
      ++broken_;
      last_error_ = error;
    }
    if (broken_ == segment_.header().extents) {
      throw PosixSetupError("posix_layout slab: no file can be read, the first is " + path(0) +
                                ": " + posix::errno_text(last_error_),
                            last_error_);
    }
    timespec now{};
    ::clock_gettime(CLOCK_REALTIME, &now);
    const auto clock = static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 +
                       static_cast<std::uint64_t>(now.tv_nsec);
    segment_.header().generation.store(std::max(clock, newest_ + 1));
  }

 private:
  [[nodiscard]] std::string path(std::uint32_t e) const {
    return segment_.files().path(segment_.root_of(e), segment_.number_of(e));
  }

  int read(int fd, std::uint64_t offset, std::size_t bytes) noexcept {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t n =
          ::pread(fd, buffer_.data + done, bytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return n < 0 ? errno : EIO;
      done += static_cast<std::size_t>(n) / kPage * kPage;
      if (static_cast<std::size_t>(n) < kPage) return EIO;
    }
    return 0;
  }

  int extent(std::uint32_t e) {
    const std::uint32_t root = segment_.root_of(e);
    const int fd = segment_.files().fd(root, segment_.number_of(e), core_.roots[root]->direct());
    if (fd < 0) return -fd;
    if (const int error = read(fd, 0, kPage); error != 0) return error;
    SlabHead h;
    std::memcpy(&h, buffer_.data, sizeof h);
    const Header& all = segment_.header();
    // Anything else is a file without objects of ours: it is formatted when it is needed.
    if (!sound(h) || h.slab_bytes != all.slab_bytes || h.number != segment_.number_of(e) ||
        h.root != all.root[root].id ||
        !std::equal(h.namespace_digest.begin(), h.namespace_digest.end(), all.namespace_digest) ||
        h.layout_bytes > kChunk - 2 * kPage) {
      return 0;
    }
    if (const int error = read(fd, 0, align_up(sizeof h + h.layout_bytes, kPage)); error != 0) {
      return error;
    }
    const char* const text = reinterpret_cast<const char*>(buffer_.data) + sizeof h;
    if (hash_of(text, h.layout_bytes) != h.layout_hash) return 0;
    const std::uint32_t c = class_for(h, text);
    if (c == kNone) return 0;
    segment_.extent(e).epoch.store(h.epoch);
    const SlabShape& shape = segment_.geometry(c).shape;
    for (std::uint32_t first = 0; first < shape.groups; first += kChunk / kPage) {
      const auto n =
          std::min<std::uint32_t>(shape.groups - first, static_cast<std::uint32_t>(kChunk / kPage));
      if (const int error = read(fd, shape.group_offset(first), std::size_t{n} * kPage);
          error != 0) {
        forget(e, shape, first);
        return error;
      }
      for (std::uint32_t g = 0; g < n; ++g) group(e, c, first + g, buffer_.data + g * kPage);
    }
    segment_.extent(e).state.store(extent_state(ExtentState::kClass, c));
    return 0;
  }

  std::uint32_t class_for(const SlabHead& h, const char* text) {
    for (std::uint32_t c = 0; c < kMaxClasses; ++c) {
      ClassRecord& r = segment_.geometry(c);
      if (r.used.load() != 0) {
        if (r.shard_count == h.shard_count && r.shard_bytes == h.shard_bytes &&
            r.layout_hash == h.layout_hash && r.layout_bytes == h.layout_bytes) {
          return same(r.shape, h) ? c : kNone;
        }
        continue;
      }
      const SlabShape shape =
          SlabShape::fit(h.slab_bytes, h.slot_bytes, h.layout_bytes, segment_.header().slot_stride,
                         segment_.header().group_stride);
      if (!same(shape, h)) return kNone;
      r.shard_count = h.shard_count;
      r.shard_bytes = h.shard_bytes;
      r.layout_hash = h.layout_hash;
      r.layout_bytes = h.layout_bytes;
      r.shape = shape;
      if (h.layout_bytes <= kMaxLayoutText) std::memcpy(r.layout, text, h.layout_bytes);
      r.used.store(1, std::memory_order_release);
      return c;
    }
    return kNone;
  }
  static bool same(const SlabShape& shape, const SlabHead& h) noexcept {
    return shape.slots == h.slots && shape.slot_bytes == h.slot_bytes &&
           shape.group_slots == h.group_slots && shape.slots != 0;
  }

  void group(std::uint32_t e, std::uint32_t c, std::uint32_t number, const std::byte* page) {
    const ClassRecord& record = segment_.geometry(c);
    const std::uint32_t g = e * segment_.header().group_stride + number;
    const std::uint32_t first = segment_.first_slot(g, record.shape);
    const std::uint32_t n = record.shape.slots_of_group(number);
    std::uint32_t free = 0;
    bool differs = false;
    for (std::uint32_t i = 0; i < n; ++i) {
      SlotHead h;
      std::memcpy(&h, page + i * sizeof h, sizeof h);
      const bool blank = h.magic == 0 && h.id.empty();
      const bool good = sound(h) && h.shards == record.shard_count && !h.id.empty();
      if (!blank && !good) segment_.header().scanned_corrupt.fetch_add(1);
      if (good && h.epoch == segment_.extent(e).epoch.load() && add(first + i, c, h)) continue;
      differs = differs || !blank;
      ++free;
    }
    segment_.group(g).free.store(free);
    segment_.group(g).dirty.store(differs ? 1 : 0);
  }

  /// Of two slots with one object of one class the younger one stays.
  bool add(std::uint32_t slot, std::uint32_t c, const SlotHead& h) {
    std::uint64_t words[2];
    split(h.id, words);
    newest_ = std::max(newest_, h.generation);
    Bucket& bucket = segment_.bucket(h.id);
    std::uint32_t at = bucket.head.load();
    Shared<std::uint32_t>* link = &bucket.head;
    while (at != kNone) {
      SlotMeta& m = segment_.meta(at);
      const std::uint32_t owner = segment_.class_of_extent(segment_.extent_of(at));
      // The extent at hand gets its class when it is through: kNone is ours.
      if (has_id(m, words) && (owner == c || owner == kNone)) {
        if (m.generation.load() >= h.generation) return false;
        link->store(m.next.load());
        set_phase(m, Phase::kFree);
        Group& g = segment_.group(segment_.group_of(at, segment_.geometry(c).shape));
        g.free.fetch_add(1);
        g.dirty.store(1);
        break;
      }
      link = &m.next;
      at = link->load();
    }
    SlotMeta& m = segment_.meta(slot);
    m.id[0].store(words[0]);
    m.id[1].store(words[1]);
    m.generation.store(h.generation);
    m.object_check.store(h.object_check);
    m.next.store(bucket.head.load());
    bucket.head.store(slot);
    set_phase(m, Phase::kObject);
    return true;
  }

  /// A file that broke in the middle: nothing of it stays in the index.
  void forget(std::uint32_t e, const SlabShape& shape, std::uint32_t groups) {
    for (std::uint32_t i = 0; i < groups * shape.group_slots && i < shape.slots; ++i) {
      const std::uint32_t slot = e * segment_.header().slot_stride + i;
      SlotMeta& m = segment_.meta(slot);
      if (phase_of(m) != Phase::kObject) continue;
      Shared<std::uint32_t>* link = &segment_.bucket(id_of(m)).head;
      while (link->load() != kNone && link->load() != slot)
        link = &segment_.meta(link->load()).next;
      if (link->load() == slot) link->store(m.next.load());
      set_phase(m, Phase::kFree);
    }
  }

  Segment& segment_;
  posix::Core& core_;
  Aligned buffer_;
  std::uint64_t newest_ = 0;
  std::uint32_t broken_ = 0;
  int last_error_ = 0;
};

}  // namespace

void scan_files(Segment& segment, posix::Core& core) { Scan(segment, core).run(); }

}  // namespace ucm::slab
