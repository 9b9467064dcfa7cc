// The stage: places operations on roots, owns every thread, reports.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <mutex>

#include "posix/core.h"
#include "posix/medium_probe.h"
#include "posix/object_layout.h"
#include "posix/pool.h"
#include "posix/threads.h"
#include "slab/slab_layout.h"
#include "ucm/keep.h"
#include "ucm/posix.h"

namespace ucm::posix {
namespace {

constexpr std::size_t kMaxRoots = 64;
constexpr std::uint32_t kSyncReadThreads = 8;
constexpr std::uint32_t kSyncWriteThreads = 4;
constexpr std::uint64_t kBytesInFlight = 32u << 20;  // per thread: enough to fill a device queue

/// Queues and threads of one root.
struct Lanes {
  Lanes(std::size_t limit) : reads(limit), writes(limit) {}
  ReadQueue reads;
  WriteQueue writes;
  std::unique_ptr<WorkerPool> readers;
  std::unique_ptr<WorkerPool> writers;
  std::thread prober;
  std::shared_ptr<std::atomic<bool>> probe_ended;
  Clock::time_point next_probe{};
};

/// On the heap of its own: a forked child must leave it alone (a condition variable with a waiter
/// that does not exist there cannot even be destroyed).
struct Watchdog {
  std::mutex mutex;
  std::condition_variable wake;
  bool stop = false;
  std::atomic<bool> ended{false};
  std::thread thread;
};

class PosixStageImpl final : public PosixStage {
 public:
  PosixStageImpl(const Geometry& geometry, PosixOptions options)
      : core_(std::make_shared<Core>(geometry, std::move(options))), pid_(getpid()) {
    const PosixOptions& o = core_->options;
    check(o);
    for (const auto& path : o.roots) {
      core_->roots.push_back(
          std::make_unique<Root>(path, o, core_->me, core_->counters, core_->errors));
    }
    std::sort(core_->roots.begin(), core_->roots.end(),
              [](const auto& a, const auto& b) { return a->id() < b->id(); });
    for (std::size_t i = 1; i < core_->roots.size(); ++i) {
      if (core_->roots[i]->id() != core_->roots[i - 1]->id()) continue;
      throw PosixSetupError("posix: " + core_->roots[i - 1]->path() + " and " +
                                core_->roots[i]->path() +
                                " are the same directory (or a copy with its .ucm-root): name each "
                                "root once",
                            0);
    }
    layout_ = o.layout == "slab" ? slab::make_slab_layout(core_) : make_file_layout(core_);
    medium_ = std::make_unique<MediumProbe>(core_);
    const EngineSupport support = probe_engines();
    for (const auto& root : core_->roots) {
      engines_.push_back(choose_engine(o.engine, support, root->direct()));
      lanes_.push_back(std::make_unique<Lanes>(o.queue_limit));
    }
    for (std::size_t i = 0; i < lanes_.size(); ++i) make_pools(i);
    layout_->start();
    watchdog_->thread = std::thread([this] {
      watch();
      watchdog_->ended.store(true);
    });
  }

  ~PosixStageImpl() override {
    if (getpid() != pid_) {
      // A forked child has none of the threads: joining or freeing would hang or crash. Leave all.
      leak_after_fork();
      return;
    }
    shutdown(Clock::now() + std::chrono::seconds(10));
  }

  const Geometry& geometry() const noexcept override { return core_->format.geometry(); }
  std::string name() const override { return "Posix"; }

  bool keep_packed() noexcept override { return layout_->keep_packed(); }

  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override {
    if (closed()) {
      std::fill(present.begin(), present.end(), std::uint8_t{0});
      return;
    }
    layout_->lookup(ids, present, stop_at_first_miss);
  }

  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override {
    submit<ReadItem>(ops, std::move(sink), deadline, Direction::kRead);
  }

  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override {
    submit<WriteItem>(ops, std::move(sink), deadline, Direction::kWrite);
  }

  void touch(std::span<const BlockId> ids) noexcept override {
    if (!closed()) layout_->touch(ids);
  }

  void remove(std::span<const BlockId> ids) noexcept override {
    if (!closed()) layout_->remove(ids);
  }

  std::map<std::string, std::uint64_t> stats() const override {
    auto out = core_->counters.snapshot();
    std::uint64_t reads = 0;
    std::uint64_t writes = 0;
    std::uint64_t out_now = 0;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      reads += lanes_[i]->reads.size();
      writes += lanes_[i]->writes.size();
      const Root& root = *core_->roots[i];
      if (!root.serves(Direction::kRead) || !root.serves(Direction::kWrite)) ++out_now;
    }
    out["read_queue"] = reads;
    out["write_queue"] = writes;
    out["roots"] = lanes_.size();
    out["roots_out"] = out_now;
    layout_->add_stats(out);
    return out;
  }

  std::string health() const override {
    std::string out;
    const auto add = [&](const std::string& line) { out += (out.empty() ? "" : "; ") + line; };
    for (const auto& root : core_->roots) {
      const int r = root->out_errno(Direction::kRead);
      const int w = root->out_errno(Direction::kWrite);
      if (r == 0 && w == 0) continue;
      add("root " + root->path() + " is out (" + (r ? "reads " : "") + (w ? "writes " : "") +
          errno_text(r ? r : w) + "): repair or remount it, it comes back by itself");
    }
    if (const auto stuck = core_->counters.get(Counter::kStuckThreads); stuck > 0) {
      add(std::to_string(stuck) + " I/O threads hang in the kernel");
    }
    if (const auto trouble = layout_->trouble(); !trouble.empty()) add(trouble);
    if (!out.empty()) {
      if (const auto last = core_->errors.latest(); !last.empty()) add("last error: " + last);
    }
    return out;
  }

  std::string identity() const override {
    std::string out;  // roots are sorted by id
    for (const auto& root : core_->roots) {
      const BlockId& id = root->id();
      out.append(reinterpret_cast<const char*>(id.bytes.data()), id.bytes.size());
    }
    return out;
  }

  std::map<std::string, std::string> describe() const override {
    std::map<std::string, std::string> out;
    const Format& f = core_->format;
    out["file_bytes"] = std::to_string(f.file_bytes());
    out["header_bytes"] = std::to_string(f.header_bytes());
    out["checksums"] = core_->options.verify_checksums ? "on" : "OFF (diagnosis only)";
    layout_->describe(out);
    for (std::size_t i = 0; i < core_->roots.size(); ++i) {
      const std::string n = std::to_string(i);
      out["root." + n] = core_->roots[i]->describe();
      out["engine." + n] =
          std::string(engine_name(engines_[i].kind)) + " (" + engines_[i].why + ")";
      out["direct." + n] = core_->roots[i]->direct() ? "on" : "off";
    }
    return out;
  }

  std::vector<std::string> last_errors() const override { return core_->errors.lines(); }

  bool collect_now(std::chrono::milliseconds timeout) override {
    return !closed() && layout_->collect_now(timeout);
  }

  std::optional<std::string> probe(Deadline deadline) override {
    if (closed()) return "the stage is closed";
    return medium_->run(deadline);
  }

  void shutdown(Deadline deadline) noexcept override {
    if (getpid() != pid_) return;
    std::scoped_lock lock(shutdown_mutex_);
    if (closing_.exchange(true)) return;
    for (auto& lane : lanes_) {
      lane->reads.close();
      lane->writes.close();
      lane->readers->finish();
      lane->writers->finish();
    }
    std::size_t left = 0;
    for (auto& lane : lanes_) {
      left += lane->readers->join(deadline);
      left += lane->writers->join(deadline);
      ReadItem read;
      while (lane->reads.pop_expired(read, {}, true)) read.answer({Status::kClosed, 0});
      WriteItem write;
      while (lane->writes.pop_expired(write, {}, true)) write.answer({Status::kClosed, 0});
    }
    {
      std::scoped_lock watch(watchdog_->mutex);
      watchdog_->stop = true;
    }
    watchdog_->wake.notify_all();
    const auto grace = std::max(deadline, Clock::now() + std::chrono::milliseconds(200));
    if (!join_until(watchdog_->thread, watchdog_->ended, grace)) ++left;
    for (auto& lane : lanes_) {
      if (lane->prober.joinable() && !join_until(lane->prober, *lane->probe_ended, grace)) ++left;
    }
    left += layout_->stop(grace);
    left += medium_->stop(grace);
    if (left > 0) {
      core_->counters.set(Counter::kStuckThreads, left);
      core_->errors.add("shutdown", "", ETIMEDOUT, std::to_string(left) + " threads left behind");
      // They still use queues, roots and lanes: all of it stays.
      keep_forever(core_);
      keep_forever(layout_);
      for (auto& lane : lanes_) keep_forever(std::shared_ptr<Lanes>(std::move(lane)));
      lanes_.clear();
    }
  }

 private:
  static void check(const PosixOptions& o) {
    const auto refuse = [](const std::string& why) { throw PosixSetupError("posix: " + why, 0); };
    if (o.roots.empty()) refuse("no directory given (storage_backends)");
    if (o.roots.size() > kMaxRoots) refuse("more than 64 directories in storage_backends");
    for (const auto& root : o.roots) {
      if (root.empty()) refuse("an empty directory name in storage_backends");
    }
    const auto& ns = o.namespace_dir;
    if (ns.empty() || ns[0] == '.' || ns.find('/') != std::string::npos) {
      refuse(
          "the namespace directory must be one path component that does not start with a dot, got "
          "'" +
          ns + "'");
    }
    const auto& gc = o.gc;
    if (!(gc.trigger > 0 && gc.trigger <= 1) || !(gc.recycle > 0 && gc.recycle <= 1) ||
        !(gc.candidate_extra >= 0 && gc.candidate_extra <= 1)) {
      refuse(
          "posix_gc_trigger and posix_gc_recycle must be in (0, 1], posix_gc_candidate_extra in "
          "[0, 1]");
    }
    if (o.queue_limit == 0) refuse("queue_limit must not be 0");
    if (o.layout != "file" && o.layout != "slab") {
      refuse("posix_layout must be file or slab, got '" + o.layout + "'");
    }
  }

  void make_pools(std::size_t i) {
    Lanes& lanes = *lanes_[i];
    Root& root = *core_->roots[i];
    const PosixOptions& o = core_->options;
    const EngineKind kind = engines_[i].kind;
    const std::uint32_t cpus = std::max(1u, std::thread::hardware_concurrency());
    const auto by_size = static_cast<std::uint32_t>(kBytesInFlight / core_->format.file_bytes());
    const std::uint32_t depth =
        o.depth != 0 ? std::min(o.depth, 1024u) : std::clamp(by_size, 4u, 64u);
    const bool sync = kind == EngineKind::kSync;
    const std::uint32_t readers = o.read_threads != 0 ? o.read_threads
                                  : sync              ? kSyncReadThreads
                                                      : std::clamp(cpus / 8, 1u, 4u);
    const std::uint32_t writers = sync ? kSyncWriteThreads : 1;
    // The factories run again when a thread is replaced; the weak reference avoids a cycle.
    const std::weak_ptr<Core> weak = core_;
    ObjectLayout& layout = *layout_;
    lanes.readers = std::make_unique<WorkerPool>(
        weak, root, Direction::kRead, readers, [&layout, &lanes, i, kind, depth] {
          return layout.make_reader(i, kind, depth, lanes.reads);
        });
    lanes.writers = std::make_unique<WorkerPool>(
        weak, root, Direction::kWrite, writers, [&layout, &lanes, i, kind, depth] {
          return layout.make_writer(i, kind, std::min(depth, 32u), lanes.writes);
        });
  }

  [[nodiscard]] bool closed() const noexcept { return closing_.load() || getpid() != pid_; }

  template <class Item, class Op, class Sink>
  void submit(std::span<const Op> ops, std::shared_ptr<Sink> sink, Deadline deadline,
              Direction direction) noexcept {
    std::size_t pushed[kMaxRoots] = {};
    const bool refuse_all = closed();
    for (const Op& op : ops) {
      Item item{op, sink, deadline};
      if (refuse_all) {
        item.answer({Status::kClosed, 0});
        continue;
      }
      const std::size_t r = layout_->root_of(op);
      if (r == ObjectLayout::kNowhere) {
        item.answer(nowhere(op));
        continue;
      }
      if (const Outcome refused = admit_op(op, r); refused.status != Status::kOk) {
        core_->counters.add(direction == Direction::kRead ? Counter::kReadRefused
                                                          : Counter::kWriteRefused);
        item.answer(refused);
        continue;
      }
      bool queued = false;
      if constexpr (std::is_same_v<Item, ReadItem>) {
        queued = lanes_[r]->reads.push(item, op.urgent);
      } else {
        queued = lanes_[r]->writes.push(item, true);
      }
      if (!queued) {
        const bool now_closed = closing_.load();
        core_->counters.add(direction == Direction::kRead ? Counter::kReadRefused
                                                          : Counter::kWriteRefused);
        item.answer({now_closed ? Status::kClosed : Status::kRejected, 0});
        continue;
      }
      ++pushed[r];
    }
    for (std::size_t r = 0; r < lanes_.size() && !refuse_all; ++r) {
      if (pushed[r] == 0) continue;
      if constexpr (std::is_same_v<Item, ReadItem>) {
        serve(*lanes_[r]->readers, lanes_[r]->reads, pushed[r]);
      } else {
        serve(*lanes_[r]->writers, lanes_[r]->writes, pushed[r]);
      }
    }
  }

  /// Starts the threads if need be and wakes them; without a thread the queue is answered here.
  template <class Queue>
  void serve(WorkerPool& pool, Queue& queue, std::size_t pushed) noexcept {
    try {
      pool.ensure_started(
          [&queue](std::shared_ptr<Waker> waker) { queue.add_waker(std::move(waker)); });
    } catch (const std::exception& e) {
      core_->errors.add("start I/O threads", "", EAGAIN, e.what());
      if constexpr (std::is_same_v<Queue, ReadQueue>) {
        ReadItem item;
        while (queue.pop_expired(item, {}, true)) item.answer({Status::kIoError, EAGAIN});
      } else {
        WriteItem item;
        while (queue.pop_expired(item, {}, true)) item.answer({Status::kIoError, EAGAIN});
      }
      return;
    }
    queue.notify(pushed);
  }

  Outcome nowhere(const ReadOp&) const noexcept {
    core_->counters.add(Counter::kReadMisses);
    return {Status::kMiss, 0};
  }
  Outcome nowhere(const WriteOp&) const noexcept {
    core_->counters.add(Counter::kWriteRefused);
    return {Status::kRejected, core_->roots[0]->out_errno(Direction::kWrite)};
  }
  Outcome admit_op(const ReadOp& op, std::size_t r) const noexcept {
    if (op.into == nullptr || reinterpret_cast<std::uintptr_t>(op.into) % kIoAlign != 0 ||
        op.begin >= op.end || op.end > geometry().shard_count) {
      return {Status::kRejected, EINVAL};
    }
    if (const int error = core_->roots[r]->out_errno(Direction::kRead))
      return {Status::kMiss, error};
    return {Status::kOk, 0};
  }
  Outcome admit_op(const WriteOp& op, std::size_t r) const noexcept {
    if (op.from == nullptr || reinterpret_cast<std::uintptr_t>(op.from) % kIoAlign != 0) {
      return {Status::kRejected, EINVAL};
    }
    if (const int error = core_->roots[r]->out_errno(Direction::kWrite)) {
      return {Status::kRejected, error};
    }
    return {Status::kOk, 0};
  }

  void watch() noexcept {
    const auto beat = std::clamp(core_->options.stall / 4, std::chrono::milliseconds(10),
                                 std::chrono::milliseconds(250));
    std::unique_lock lock(watchdog_->mutex);
    while (!watchdog_->wake.wait_for(lock, beat, [&] { return watchdog_->stop; })) {
      lock.unlock();
      const auto now = Clock::now();
      for (std::size_t i = 0; i < lanes_.size(); ++i) watch_root(i, now);
      layout_->tick(now);
      lock.lock();
    }
  }

  void watch_root(std::size_t i, Clock::time_point now) noexcept {
    Lanes& lanes = *lanes_[i];
    Root& root = *core_->roots[i];
    lanes.readers->watch(now, core_->options.stall);
    lanes.writers->watch(now, core_->options.stall);
    // With every thread busy or hung nobody takes from the queue: deadlines pass here too.
    const bool reads_out = !root.serves(Direction::kRead);
    ReadItem read;
    while (lanes.reads.pop_expired(read, now, reads_out)) {
      core_->counters.add(reads_out ? Counter::kReadRefused : Counter::kReadTimeouts);
      read.answer(reads_out ? Outcome{Status::kMiss, root.out_errno(Direction::kRead)}
                            : Outcome{Status::kTimeout, 0});
      read.sink.reset();
    }
    const bool writes_out = !root.serves(Direction::kWrite);
    WriteItem write;
    while (lanes.writes.pop_expired(write, now, writes_out)) {
      core_->counters.add(writes_out ? Counter::kWriteRefused : Counter::kWriteTimeouts);
      write.answer(writes_out ? Outcome{Status::kRejected, root.out_errno(Direction::kWrite)}
                              : Outcome{Status::kTimeout, 0});
      write.sink.reset();
    }
    probe_if_due(i, now, reads_out || writes_out);
  }

  void probe_if_due(std::size_t i, Clock::time_point now, bool out) noexcept {
    Lanes& lanes = *lanes_[i];
    if (lanes.prober.joinable()) {
      if (!lanes.probe_ended->load()) return;  // the one before may hang: one at a time
      lanes.prober.join();
      lanes.next_probe = now + core_->options.probe_interval;
    }
    if (!out || now < lanes.next_probe) return;
    try {
      lanes.probe_ended = std::make_shared<std::atomic<bool>>(false);
      lanes.prober = std::thread([core = core_, i, ended = lanes.probe_ended] {
        (void)core->roots[i]->probe();
        ended->store(true);
      });
    } catch (...) {
      lanes.next_probe = now + core_->options.probe_interval;
    }
  }

  void leak_after_fork() noexcept {
    keep_forever(core_);
    keep_forever(layout_);
    for (auto& lane : lanes_) keep_forever(std::shared_ptr<Lanes>(std::move(lane)));
    keep_forever(std::shared_ptr<Watchdog>(std::move(watchdog_)));
    keep_forever(std::shared_ptr<MediumProbe>(std::move(medium_)));
  }

  std::shared_ptr<Core> core_;
  const pid_t pid_;
  std::shared_ptr<ObjectLayout> layout_;
  std::unique_ptr<MediumProbe> medium_;
  std::vector<EngineChoice> engines_;
  std::vector<std::unique_ptr<Lanes>> lanes_;
  std::atomic<bool> closing_{false};
  std::mutex shutdown_mutex_;
  std::unique_ptr<Watchdog> watchdog_ = std::make_unique<Watchdog>();
};

}  // namespace
}  // namespace ucm::posix

namespace ucm {

std::shared_ptr<PosixStage> make_posix_stage(const Geometry& geometry, PosixOptions options) {
  return std::make_shared<posix::PosixStageImpl>(geometry, std::move(options));
}

}  // namespace ucm
