#include "posix/collector.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>

#include "chaos/hooks.h"
#include "posix/threads.h"

namespace ucm::posix {
namespace {

constexpr unsigned kSample = 16;               // an estimate looks into every 16th directory
constexpr std::uint64_t kSampleFrom = 65'536;  // files; fewer are simply counted
constexpr int kMaxPasses = 16;                 // scans of one round; each must make progress

std::int64_t nanos(const timespec& t) noexcept {
  return static_cast<std::int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

}  // namespace

void Collector::start(Core& core) {
  if (!options_.gc.enabled) return;
  for (const auto& root : core.roots) {
    // A lease on the disk below a lost mount would be the one file that we write there.
    leases_.push_back(
        std::make_unique<Lease>(root->path(), options_.gc, core.me,
                                [r = root.get()](int fd) { return r->check_identity(fd); }));
  }
  for (std::size_t i = 0; i < leases_.size(); ++i) {
    const auto held = leases_[i]->hold();
    if (held != Lease::Held::kConflict) continue;
    const std::string message =
        "posix root " + core.roots[i]->path() +
        ": a running instance collects it with other settings: theirs " + leases_[i]->other() +
        ", ours " + settings_text(options_.gc) +
        "; give every instance that shares the directory the same posix_capacity_gb and posix_gc_*";
    for (auto& lease : leases_) lease->release();
    throw PosixSetupError(message, 0);
  }
  thread_ = std::thread([this, keep = core_.lock()] {
    if (keep) run(*keep);
    ended_.store(true);
  });
}

void Collector::wrote(std::uint64_t bytes) noexcept {
  const std::uint64_t capacity = options_.gc.capacity_bytes;
  if (capacity == 0) return;
  const std::uint64_t before = written_.fetch_add(bytes, std::memory_order_relaxed);
  if ((before + bytes) * 20 > capacity && !burst_.exchange(true)) work_.notify_all();
}

void Collector::no_space() noexcept {
  if (options_.gc.capacity_bytes == 0) return;  // the operator keeps the directory, we only fail
  {
    std::scoped_lock lock(mutex_);
    full_ = true;
  }
  work_.notify_all();
}

bool Collector::collect_now(std::chrono::milliseconds timeout) noexcept {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable() || stopping_) return false;
  const std::uint64_t mine = ++asked_;
  work_.notify_all();
  return progress_.wait_for(lock, timeout, [&] { return answered_ >= mine || ended_.load(); }) &&
         last_ran_;
}

std::string Collector::trouble() const {
  std::scoped_lock lock(mutex_);
  return trouble_;
}

bool Collector::stopping() const {
  std::scoped_lock lock(mutex_);
  return stopping_;
}

void Collector::run(Core& core) noexcept {
  // The lease must be renewed well within its life, whatever the interval is.
  const auto beat = std::max(std::chrono::milliseconds(1),
                             std::min(options_.gc.interval, options_.gc.lease_ttl / 3));
  auto next_round = Clock::now();  // the first at once: orphans of a crash, files of earlier runs
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    work_.wait_for(lock, rounds_ == 0 ? std::chrono::milliseconds(0) : beat,
                   [&] { return stopping_ || asked_ > answered_ || full_ || burst_.load(); });
    if (stopping_) break;
    const bool forced = std::exchange(full_, false);
    const std::uint64_t serving = asked_;
    const bool due =
        forced || serving > answered_ || burst_.exchange(false) || Clock::now() >= next_round;
    lock.unlock();
    bool ran = false;
    try {
      if (hold_leases(core) && due) {
        round(core, forced);
        ran = true;
      }
    } catch (const std::exception& e) {
      core.counters.add(Counter::kGcErrors);
      core.errors.add("collect", core.roots.front()->path(), 0, e.what());
    }
    if (due) next_round = Clock::now() + options_.gc.interval;
    lock.lock();
    ++rounds_;
    if (due) last_ran_ = ran;
    answered_ = serving;
    progress_.notify_all();
    // Rounds brought forward (a burst of writes, a full disk) come at most every 100 ms.
    if (ran && !stopping_ && asked_ == answered_) {
      work_.wait_for(lock, std::min(beat, std::chrono::milliseconds(100)),
                     [&] { return stopping_ || asked_ > answered_; });
    }
  }
  lock.unlock();
  for (auto& lease : leases_) lease->release();
  progress_.notify_all();
}

bool Collector::hold_leases(Core& core) {
  bool all = true;
  std::string trouble;
  for (std::size_t i = 0; i < leases_.size(); ++i) {
    if (!core.roots[i]->serves(Direction::kWrite)) continue;
    switch (leases_[i]->hold()) {
      case Lease::Held::kYes:
        break;
      case Lease::Held::kNo:
        all = false;
        break;
      case Lease::Held::kConflict:
        all = false;
        trouble = core.roots[i]->path() +
                  ": collected by another instance with other settings: " + leases_[i]->other() +
                  "; ours are not in force";
        break;
      case Lease::Held::kError:
        all = false;
        core.counters.add(Counter::kGcErrors);
        core.errors.add("lease", core.roots[i]->path(), leases_[i]->error());
        break;
    }
    if (!all) break;
  }
  if (!all) {
    // All or nothing, in the order of root identities: two instances never hold half each for ever.
    for (auto& lease : leases_) lease->release();
  }
  core.counters.set(Counter::kGcIsCollector, all ? 1 : 0);
  std::scoped_lock lock(mutex_);
  trouble_ = std::move(trouble);
  return all;
}

Usage Collector::estimate(Core& core) {
  const bool count_all = !scanned_ || core.counters.get(Counter::kGcFiles) < kSampleFrom ||
                         options_.gc.interval.count() == 0;
  Usage usage;
  ScanOptions scan;
  scan.candidates = false;
  scan.sample = count_all ? 1 : kSample;
  scan.sample_turn = static_cast<unsigned>(rounds_);
  scan.stop = [this] { return stopping(); };
  for (std::size_t i = 0; i < core.roots.size(); ++i) {
    if (!core.roots[i]->serves(Direction::kRead)) continue;
    const std::int64_t age_ns = options_.gc.orphan_age.count() * 1'000'000;
    scan.orphans_before_ns = nanos(leases_[i]->medium_now()) - age_ns;
    scan.orphans_after_ns = nanos(leases_[i]->medium_now()) + age_ns;
    scan_root(core, *core.roots[i], scan, usage);
  }
  usage.bytes *= scan.sample;
  usage.files *= scan.sample;
  scanned_ = true;
  return usage;
}

void Collector::round(Core& core, bool forced) {
  core.counters.add(Counter::kGcRounds);
  written_.store(0);
  const Usage usage = estimate(core);
  core.counters.set(Counter::kGcUsedBytes, usage.bytes);
  core.counters.set(Counter::kGcFiles, usage.files);
  core.counters.set(Counter::kGcTemporaries, usage.temporaries);
  const double limit = static_cast<double>(options_.gc.capacity_bytes) * options_.gc.trigger;
  if (options_.gc.capacity_bytes == 0) return;
  if (!forced && static_cast<double>(usage.bytes) <= limit) return;
  collect(core, usage, forced);
}

void Collector::collect(Core& core, Usage usage, bool forced) {
  const PosixGcOptions& gc = options_.gc;
  const auto capacity = static_cast<double>(gc.capacity_bytes);
  auto target = static_cast<std::uint64_t>(capacity * std::max(0.0, gc.trigger - gc.recycle));
  if (forced && usage.bytes <= target) {
    // The disk is full although our share is small: give back a recycle's worth all the same.
    target = static_cast<std::uint64_t>(static_cast<double>(usage.bytes) * (1.0 - gc.recycle));
  }
  for (int pass = 0; pass < kMaxPasses && !stopping(); ++pass) {
    Usage found;
    ScanOptions scan;
    scan.keep_share = std::clamp(gc.recycle + gc.candidate_extra, 0.0, 1.0);
    scan.stop = [this] { return stopping(); };
    for (const auto& root : core.roots) {
      if (root->serves(Direction::kRead)) scan_root(core, *root, scan, found);
    }
    core.counters.set(Counter::kGcUsedBytes, found.bytes);
    core.counters.set(Counter::kGcFiles, found.files);
    // At least one object per triggered round, whatever the rounding says.
    const std::uint64_t need = found.bytes > target ? found.bytes - target : pass == 0 ? 1 : 0;
    if (need == 0 || stopping()) return;
    const std::uint64_t removed_before = core.counters.get(Counter::kGcRemoved);
    const std::uint64_t freed = remove_coldest(core, found, need);
    core.counters.sub(Counter::kGcUsedBytes, freed);
    core.counters.sub(Counter::kGcFiles, core.counters.get(Counter::kGcRemoved) - removed_before);
    if (freed == 0) return;
    if (freed >= need || !hold_leases(core)) return;
  }
}

std::uint64_t Collector::remove_coldest(Core& core, Usage& usage, std::uint64_t need) {
  auto& all = usage.candidates;
  const auto colder = [](const Candidate& a, const Candidate& b) {
    return a.atime_ns < b.atime_ns;
  };
  std::uint64_t freed = 0;
  std::size_t done = 0;
  while (freed < need && done < all.size() && !stopping()) {
    const std::uint64_t rest =
        usage.files == 0 ? 1 : std::max<std::uint64_t>(1, usage.bytes / usage.files);
    const auto wanted =
        std::min<std::uint64_t>((need - freed + rest - 1) / rest, all.size() - done);
    const auto begin = all.begin() + static_cast<std::ptrdiff_t>(done);
    const auto end = begin + static_cast<std::ptrdiff_t>(wanted);
    std::nth_element(begin, end - 1, all.end(), colder);
    // By directory: each is opened once, and the medium works on one at a time.
    std::sort(begin, end,
              [](const Candidate& a, const Candidate& b) { return a.directory < b.directory; });
    std::uint32_t open_index = UINT32_MAX;
    Fd dir;
    for (auto c = begin; c != end && !stopping(); ++c) {
      if (c->directory != open_index) {
        open_index = c->directory;
        dir = Fd(open(usage.directories[open_index].c_str(),
                      O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
      }
      if (!dir) continue;
      const ObjectPath path(c->id);
      struct stat st {};
      // Warmed or replaced since it was seen: it is not among the coldest any more.
      if (fstatat(dir.get(), path.file(), &st, AT_SYMLINK_NOFOLLOW) < 0 ||
          nanos(st.st_atim) != c->atime_ns) {
        continue;
      }
      if (unlinkat(dir.get(), path.file(), 0) == 0) {
        freed += c->bytes;
        UCM_CHAOS_POINT(kCollecting);
        core.counters.add(Counter::kGcRemoved);
        core.counters.add(Counter::kGcRemovedBytes, c->bytes);
      } else if (errno != ENOENT) {
        core.counters.add(Counter::kGcErrors);
        core.errors.add("unlink", usage.directories[open_index] + "/" + path.file(), errno);
      }
    }
    done += wanted;
  }
  return freed;
}

bool Collector::stop(Deadline deadline) noexcept {
  {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  return join_until(thread_, ended_, deadline);
}

}  // namespace ucm::posix
