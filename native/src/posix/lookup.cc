#include "posix/lookup.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "posix/housekeeper.h"
#include "posix/threads.h"

namespace ucm::posix {
namespace {

constexpr std::size_t kProbeEvery = 64;  // ids between looks at the clock
constexpr auto kSlowPerId = std::chrono::microseconds(25);
/// What a local file system is asked by the caller alone; the rest of a longer batch is spread over
/// the cores, because an absent name costs the kernel several microseconds.
constexpr std::size_t kAlone = 1024;

/// One root as one batch sees it: the directory handle is fetched once.
class RootView {
 public:
  explicit RootView(Core& core, Root& root) : core_(core), root_(root) { refresh(); }

  bool present(const BlockId& id) noexcept {
    if (!dir_) return false;
    const ObjectPath path(id);
    struct stat st;
    int r = ask(path, st);
    if (r < 0 && errno == ENOENT && !checked_) {
      // The first miss of a batch: was it the object or the directory handle that is gone?
      checked_ = true;
      if (root_.revalidate()) {
        refresh();
        if (!dir_) return false;
        r = ask(path, st);
      } else {
        errno = ENOENT;
      }
    }
    if (r < 0) {
      if (errno != ENOENT && errno != ENOTDIR) {
        core_.counters.add(Counter::kLookupErrors);
        core_.errors.add("stat", root_.full_path(path.c_str()), errno);
        root_.note_error(Direction::kRead, errno, id);
      }
      return false;
    }
    if (!S_ISREG(st.st_mode) || !holds(id, path, static_cast<std::uint64_t>(st.st_size))) {
      return false;
    }
    core_.housekeeper->seen(id, st.st_atim);
    return true;
  }

 private:
  void refresh() noexcept {
    dir_ = root_.serves(Direction::kRead) ? root_.ns_dir() : nullptr;
    if (!dir_ && root_.serves(Direction::kRead) && root_.revalidate()) dir_ = root_.ns_dir();
  }
  /// Sizes tell, but for the first objects of another layout whose headers and paddings differ.
  bool holds(const BlockId& id, const ObjectPath& path, std::uint64_t bytes) noexcept {
    const Verdict verdict = core_.format.judge_size(bytes);
    if (verdict != Verdict::kForeign) return verdict != Verdict::kBad;
    const Verdict asked = ask_header(core_.format, dir_->get(), id, path, bytes);
    return asked == Verdict::kConvertible || asked == Verdict::kPacked;
  }
  int ask(const ObjectPath& path, struct stat& st) noexcept {
    if (core_.options.faults) [[unlikely]] {
      std::size_t bytes = 0;
      if (const int spoiled = core_.options.faults->before(IoStep::kStat, path.c_str(), bytes);
          spoiled < 0) {
        errno = -spoiled;
        return -1;
      }
    }
    return fstatat(dir_->get(), path.c_str(), &st, AT_SYMLINK_NOFOLLOW);
  }

  Core& core_;
  Root& root_;
  std::shared_ptr<const Fd> dir_;
  bool checked_ = false;
};

/// Takes chunks of a job until it is through.
void work_on(Core& core, Root& root, LookupJob& job) {
  RootView view(core, root);
  for (;;) {
    const std::size_t begin = job.next.fetch_add(LookupHelpers::kChunk);
    if (begin >= job.ids.size()) return;
    const std::size_t end = std::min(begin + LookupHelpers::kChunk, job.ids.size());
    for (std::size_t i = begin; i < end; ++i) {
      if (i > job.stop_before.load(std::memory_order_relaxed)) continue;
      const bool found = view.present(job.ids[i]);
      job.present[i] = found ? 1 : 0;
      if (!found && job.stop_at_first_miss) {
        std::size_t now = job.stop_before.load();
        while (i < now && !job.stop_before.compare_exchange_weak(now, i)) {
        }
      }
    }
    if (job.done.fetch_add(end - begin) + (end - begin) == job.ids.size()) {
      std::scoped_lock lock(job.mutex);
      job.finished.notify_all();
    }
  }
}

}  // namespace

bool LookupHelpers::submit(const std::shared_ptr<LookupJob>& job, std::size_t threads) noexcept {
  try {
    std::scoped_lock lock(mutex_);
    if (stopping_) return false;
    const std::size_t chunks = (job->ids.size() + kChunk - 1) / kChunk;
    const std::size_t wanted = std::min({threads, kThreads, chunks});
    while (threads_.size() < wanted) {
      auto entry = std::make_unique<Thread>();
      entry->thread = std::thread([this, keep = core_.lock(), ended = &entry->ended] {
        if (keep) run(*keep);
        ended->store(true);
      });
      threads_.push_back(std::move(entry));
    }
    for (std::size_t i = 0; i < wanted; ++i) jobs_.push_back(job);
  } catch (...) {
    return false;
  }
  work_.notify_all();
  return true;
}

void LookupHelpers::run(Core& core) noexcept {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    work_on(core, *core.roots[root_], *job);
    lock.lock();
  }
}

bool LookupHelpers::stop(Deadline deadline) noexcept {
  {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  bool all = true;
  for (auto& entry : threads_) {
    if (join_until(entry->thread, entry->ended, deadline)) continue;
    all = false;
    (void)entry.release();  // the thread left behind still sets its flag
  }
  return all;
}

Lookup::Lookup(std::shared_ptr<Core> core)
    : core_(std::move(core)),
      cores_(std::max<std::size_t>(1, std::thread::hardware_concurrency())) {
  for (std::size_t i = 0; i < core_->roots.size(); ++i) {
    all_local_ = all_local_ && core_->roots[i]->local();
    helpers_.push_back(std::make_unique<LookupHelpers>(core_, i));
  }
}

void Lookup::run(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                 bool stop_at_first_miss) noexcept {
  std::memset(present.data(), 0, present.size());
  core_->counters.add(Counter::kLookups, ids.size());
  core_->housekeeper->drain_removes();
  try {
    std::size_t done = 0;
    bool missed = false;
    std::size_t threads = LookupHelpers::kThreads;
    if (all_local_) {
      const std::size_t alone = cores_ == 1 ? ids.size() : std::min(kAlone, ids.size());
      done = in_place(ids.first(alone), present.first(alone), stop_at_first_miss, missed);
      if (done == alone) threads = cores_;  // quick: the work is the processor's, not the medium's
    }
    if (done < ids.size() && !missed) {
      with_helpers(ids.subspan(done), present.subspan(done), stop_at_first_miss, threads);
    }
  } catch (...) {
    // No memory: what was not asked stays absent, which is always safe.
    core_->counters.add(Counter::kLookupErrors);
  }
  core_->counters.add(Counter::kLookupHits,
                      static_cast<std::uint64_t>(std::count(present.begin(), present.end(), 1)));
}

std::size_t Lookup::in_place(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                             bool stop_at_first_miss, bool& missed) {
  std::vector<RootView> views;
  views.reserve(core_->roots.size());
  for (const auto& root : core_->roots) views.emplace_back(*core_, *root);
  auto began = Clock::now();
  for (std::size_t i = 0; i < ids.size(); ++i) {
    present[i] = views[core_->place(ids[i])].present(ids[i]) ? 1 : 0;
    if (present[i] == 0 && stop_at_first_miss) {
      missed = true;
      return i + 1;
    }
    if ((i + 1) % kProbeEvery == 0) {
      const auto now = Clock::now();
      if (now - began > kProbeEvery * kSlowPerId) return i + 1;  // cold disk: ask many at once
      began = now;
    }
  }
  return ids.size();
}

void Lookup::with_helpers(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                          bool stop_at_first_miss, std::size_t threads) {
  const std::size_t roots = core_->roots.size();
  std::vector<std::shared_ptr<LookupJob>> jobs(roots);
  std::vector<std::vector<std::uint32_t>> rows(roots);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::size_t r = core_->place(ids[i]);
    if (!core_->roots[r]->serves(Direction::kRead)) continue;
    if (!jobs[r]) jobs[r] = std::make_shared<LookupJob>();
    jobs[r]->ids.push_back(ids[i]);
    rows[r].push_back(static_cast<std::uint32_t>(i));
  }
  const auto deadline = Clock::now() + core_->options.lookup_timeout;
  for (std::size_t r = 0; r < roots; ++r) {
    if (!jobs[r]) continue;
    jobs[r]->present.assign(jobs[r]->ids.size(), 0);
    jobs[r]->stop_at_first_miss = stop_at_first_miss;
    if (!helpers_[r]->submit(jobs[r], threads)) jobs[r].reset();
  }
  for (std::size_t r = 0; r < roots; ++r) {
    if (!jobs[r]) continue;
    LookupJob& job = *jobs[r];
    {
      std::unique_lock lock(job.mutex);
      if (!job.finished.wait_until(lock, deadline, [&] { return job.done == job.ids.size(); })) {
        // Absent is safe; entries not begun are not asked any more. Without any progress the helpers
        // are stuck in the kernel: take the root out, a probe will bring it back.
        job.next.store(job.ids.size());
        core_->counters.add(Counter::kLookupTimeouts);
        if (job.done.load() == 0) {
          core_->roots[r]->take_out(Direction::kRead, ETIMEDOUT, "a lookup did not end in time");
        }
        continue;
      }
    }
    for (std::size_t k = 0; k < rows[r].size(); ++k) {
      const bool asked = k <= job.stop_before.load();
      present[rows[r][k]] = asked ? job.present[k] : 0;
    }
  }
}

bool Lookup::stop(Deadline deadline) noexcept {
  bool all = true;
  for (auto& h : helpers_) {
    if (h->stop(deadline)) continue;
    all = false;
    (void)h.release();
  }
  return all;
}

}  // namespace ucm::posix
