#include "slab/slab_layout.h"

#include <algorithm>

#include "cache/futex.h"
#include "slab/read_worker.h"
#include "slab/scribe.h"
#include "slab/write_worker.h"

namespace ucm::slab {
namespace {

using namespace std::chrono_literals;
using posix::Counter;

class SlabLayout final : public posix::ObjectLayout {
 public:
  explicit SlabLayout(std::shared_ptr<posix::Core> core) {
    check(*core);
    auto segment = Segment::open(*core);
    (void)recover_dead(*segment, core->options.quarantine);
    parts_ = std::make_shared<Parts>(std::move(core), std::move(segment));
    parts_->scribe = std::make_unique<Scribe>(parts_);
  }

  std::size_t root_of(const ReadOp& op) noexcept override {
    const std::uint32_t slot = parts_->index.probe(op.id);
    if (slot == kNone) return kNowhere;
    const std::uint32_t root = parts_->segment->root_of(parts_->segment->extent_of(slot));
    return usable(root, posix::Direction::kRead) ? root : kNowhere;
  }

  std::size_t root_of(const WriteOp& op) noexcept override {
    // Any root will do, for the index knows where objects are: one that serves, chosen by the id.
    const std::size_t n = parts_->core->roots.size();
    std::size_t serving = 0;
    for (std::uint32_t r = 0; r < n; ++r) serving += usable(r, posix::Direction::kWrite) ? 1 : 0;
    if (serving == 0) return kNowhere;
    std::size_t pick = op.id.word() % serving;
    for (std::uint32_t r = 0; r < n; ++r) {
      if (usable(r, posix::Direction::kWrite) && pick-- == 0) return r;
    }
    return kNowhere;  // one went out meanwhile
  }

  std::shared_ptr<posix::Worker> make_reader(std::size_t root, posix::EngineKind kind,
                                             std::uint32_t depth,
                                             posix::ReadQueue& queue) override {
    return std::make_shared<ReadWorker>(parts_, static_cast<std::uint32_t>(root), kind, depth,
                                        queue);
  }
  std::shared_ptr<posix::Worker> make_writer(std::size_t root, posix::EngineKind kind,
                                             std::uint32_t depth,
                                             posix::WriteQueue& queue) override {
    return std::make_shared<WriteWorker>(parts_, static_cast<std::uint32_t>(root), kind, depth,
                                         queue);
  }

  void start() override { parts_->scribe->start(); }

  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override {
    std::uint32_t serving = 0;
    for (std::uint32_t r = 0; r < parts_->core->roots.size(); ++r) {
      serving |= usable(r, posix::Direction::kRead) ? 1u << r : 0u;
    }
    parts_->index.lookup(ids, present, stop_at_first_miss, serving);
    const auto hits = static_cast<std::uint64_t>(std::count(present.begin(), present.end(), 1));
    parts_->core->counters.add(Counter::kLookups, ids.size());
    parts_->core->counters.add(Counter::kLookupHits, hits);
  }

  void touch(std::span<const BlockId> ids) noexcept override {
    parts_->index.touch(ids);
    parts_->core->counters.add(Counter::kTouches, ids.size());
  }

  void remove(std::span<const BlockId> ids) noexcept override {
    for (const BlockId& id : ids) {
      bool any = false;
      // One per geometry that we can read.
      for (std::uint32_t i = 0; i < kMaxClasses; ++i) {
        const std::uint32_t group = parts_->index.remove(id, 0);
        if (group == kNone) break;
        parts_->scribe->page(group);
        any = true;
      }
      if (any) parts_->core->counters.add(Counter::kRemoved);
    }
  }

  /// Nothing is collected: CLOCK gives up what a write needs. The other housekeeping is done.
  bool collect_now(std::chrono::milliseconds timeout) override {
    (void)recover_dead(*parts_->segment, parts_->core->options.quarantine);
    return parts_->scribe->flush(timeout);
  }

  void tick(Clock::time_point now) noexcept override {
    if (now < next_recovery_) return;
    next_recovery_ = now + 250ms;
    (void)recover_dead(*parts_->segment, parts_->core->options.quarantine);
  }

  std::string trouble() const override {
    std::string out;
    const auto add = [&](std::uint32_t r, const char* what) {
      out += (out.empty() ? "" : "; ") + parts_->core->roots[r]->full_path("") + what;
    };
    for (std::uint32_t r = 0; r < parts_->core->roots.size(); ++r) {
      if ((parts_->lost.load() >> r & 1u) != 0) {
        add(r, " was taken by another host: stop one of the two");
      }
      if ((parts_->gone.load() >> r & 1u) != 0) {
        add(r, " has lost its slab files: start the engine again to make new ones");
      }
    }
    return out;
  }

  void describe(std::map<std::string, std::string>& facts) const override {
    const Header& h = parts_->segment->header();
    const SlabShape& shape = parts_->index.own_shape();
    facts["layout"] = "slab";
    facts["fsync"] = parts_->core->options.fsync ? "before and after the slot heads" : "off";
    facts["gc"] = "slots are reused by CLOCK";
    facts["slab_bytes"] = std::to_string(h.slab_bytes);
    facts["slabs"] = std::to_string(h.extents);
    facts["slots_per_slab"] = std::to_string(shape.slots);
    facts["slots_per_group"] = std::to_string(shape.group_slots);
    facts["index_bytes"] = std::to_string(h.segment_bytes);
    facts["index"] = parts_->segment->path() +
                     (parts_->segment->created() ? " (rebuilt from the files)" : " (joined)");
  }

  void add_stats(std::map<std::string, std::uint64_t>& stats) const override {
    Segment& s = *parts_->segment;
    const Header& h = s.header();
    const std::uint32_t own = parts_->index.own_class();
    const SlabShape& shape = parts_->index.own_shape();
    std::uint64_t slots = 0, free = 0, slabs = 0, unformatted = 0, broken = 0, owned = 0,
                  closed = 0;
    const std::uint32_t now = cache::monotonic_seconds();
    for (std::uint32_t e = 0; e < h.extents; ++e) {
      const std::uint32_t state = s.extent(e).state.load() >> 16;
      unformatted += state == static_cast<std::uint32_t>(ExtentState::kFree);
      broken += state == static_cast<std::uint32_t>(ExtentState::kBroken);
      if (s.class_of_extent(e) != own) continue;
      ++slabs;
      slots += shape.slots;
      for (std::uint32_t g = 0; g < shape.groups; ++g) {
        const Group& group = s.group(e * h.group_stride + g);
        free += group.free.load(std::memory_order_relaxed);
        owned += group.owner.load(std::memory_order_relaxed) != 0;
        closed += group.closed_until.load(std::memory_order_relaxed) > now;
      }
    }
    std::uint64_t processes = 0;
    for (const ProcessRecord& p : h.process) processes += p.used.load() != 0;
    stats["slab_slots"] = slots;
    stats["slab_slots_free"] = free;
    stats["slab_groups_in_use"] = owned;
    stats["slab_groups_closed"] = closed;
    stats["slab_files"] = slabs;
    stats["slab_files_unformatted"] = unformatted;
    stats["slab_files_broken"] = broken;
    stats["slab_processes"] = processes;
    stats["slab_evictions_total"] = s.geometry(own).evictions.load();
    stats["slab_recovered_processes_total"] = h.recovered.load();
    stats["slab_scanned_corrupt"] = h.scanned_corrupt.load();
    stats["slab_page_writes_total"] = parts_->page_writes.load();
    stats["slab_commits_total"] = parts_->commits.load();
    stats["slab_no_slot_total"] = parts_->no_slot.load();
  }

  std::size_t stop(Deadline grace) noexcept override { return parts_->scribe->stop(grace) ? 0 : 1; }

 private:
  static void check(const posix::Core& core) {
    const auto refuse = [](const std::string& why) {
      throw PosixSetupError("posix_layout slab: " + why, 0);
    };
    if (core.options.gc.capacity_bytes == 0) {
      refuse("posix_capacity_gb is required, for the files are preallocated; set it");
    }
    if (core.roots.size() > kMaxRoots) refuse("more than 16 directories in storage_backends");
    for (const auto& root : core.roots) {
      refuse_file_layout(root->full_path(""));
      if (root->local()) continue;
      refuse(
          root->describe() +
          " is not a local file system; slab is for the disks of one node: use posix_layout file");
    }
  }
  [[nodiscard]] bool usable(std::uint32_t r, posix::Direction d) const noexcept {
    return parts_->usable(r, d);
  }

  std::shared_ptr<Parts> parts_;
  Clock::time_point next_recovery_{};
};

}  // namespace

std::shared_ptr<posix::ObjectLayout> make_slab_layout(std::shared_ptr<posix::Core> core) {
  return std::make_shared<SlabLayout>(std::move(core));
}

}  // namespace ucm::slab
