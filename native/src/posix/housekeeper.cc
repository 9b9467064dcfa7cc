#include "posix/housekeeper.h"

#include <fcntl.h>

#include <cerrno>
#include <ctime>

#include "posix/threads.h"

namespace ucm::posix {
namespace {

constexpr auto kDrainBound = std::chrono::seconds(1);

}  // namespace

bool Housekeeper::is_old(const timespec& atime) const noexcept {
  if (options_.touch_interval.count() == 0) return true;
  timespec now{};
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  const std::int64_t age_ms =
      (now.tv_sec - atime.tv_sec) * 1000 + (now.tv_nsec - atime.tv_nsec) / 1'000'000;
  return age_ms >= options_.touch_interval.count();
}

bool Housekeeper::start_locked() noexcept {
  if (thread_.joinable()) return true;
  if (stopping_) return false;
  try {
    thread_ = std::thread([this, keep = core_.lock()] {
      if (keep) run(*keep);
      ended_.store(true);
    });
    return true;
  } catch (...) {
    return false;
  }
}

void Housekeeper::touch(std::span<const BlockId> ids) noexcept {
  if (!wants_heat() || ids.empty()) return;
  std::size_t taken = 0;
  try {
    std::scoped_lock lock(mutex_);
    if (start_locked()) {
      taken = std::min(ids.size(), kTouchLimit - std::min(kTouchLimit, touches_.size()));
      touches_.insert(touches_.end(), ids.begin(),
                      ids.begin() + static_cast<std::ptrdiff_t>(taken));
    }
  } catch (...) {
    taken = 0;
  }
  if (taken > 0) work_.notify_one();
  if (taken < ids.size()) {
    if (const auto core = core_.lock()) {
      core->counters.add(Counter::kTouchesDropped, ids.size() - taken);
    }
  }
}

void Housekeeper::remove(std::span<const BlockId> ids) noexcept {
  std::size_t taken = 0;
  try {
    std::scoped_lock lock(mutex_);
    if (start_locked()) {
      taken = std::min(ids.size(), kRemoveLimit - std::min(kRemoveLimit, removes_.size()));
      removes_.insert(removes_.end(), ids.begin(),
                      ids.begin() + static_cast<std::ptrdiff_t>(taken));
      removes_asked_ += taken;
      if (taken > 0) removes_open_.store(true);
    }
  } catch (...) {
    taken = 0;
  }
  work_.notify_one();
  if (taken < ids.size()) {  // no room: the caller does the rest itself
    if (const auto core = core_.lock()) {
      for (const BlockId& id : ids.subspan(taken)) remove_one(*core, id);
    }
  }
}

void Housekeeper::drain_removes() noexcept {
  if (!removes_open_.load() || stuck_.load()) return;
  std::unique_lock lock(mutex_);
  const std::uint64_t goal = removes_asked_;
  // A removal that hangs must not hang lookups: after one bound nobody waits until it moves again.
  if (!progress_.wait_for(lock, kDrainBound, [&] { return removes_done_ >= goal || ended_; })) {
    stuck_.store(true);
  }
}

void Housekeeper::run(Core& core) noexcept {
  std::vector<BlockId> touches;
  std::vector<BlockId> removes;
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !touches_.empty() || !removes_.empty(); });
    if (stopping_ && removes_.empty()) return;
    touches.swap(touches_);
    removes.swap(removes_);
    lock.unlock();
    for (const BlockId& id : removes) remove_one(core, id);
    stuck_.store(false);
    lock.lock();
    removes_done_ += removes.size();
    if (removes_done_ == removes_asked_) removes_open_.store(false);
    progress_.notify_all();
    const bool skip_touches = stopping_;
    lock.unlock();
    if (!skip_touches) {
      for (const BlockId& id : touches) {
        touch_one(core, id);
        if (removes_open_.load()) break;  // somebody waits for those; heat is a hint
      }
    }
    touches.clear();
    removes.clear();
    lock.lock();
  }
}

void Housekeeper::touch_one(Core& core, const BlockId& id) const noexcept {
  Root& root = *core.roots[core.place(id)];
  if (!root.serves(Direction::kRead)) return;
  const auto dir = root.ns_dir();
  if (!dir) return;
  const ObjectPath path(id);
  struct stat st {};
  if (fstatat(dir->get(), path.c_str(), &st, AT_SYMLINK_NOFOLLOW) < 0 || !is_old(st.st_atim))
    return;
  const timespec times[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
  if (utimensat(dir->get(), path.c_str(), times, AT_SYMLINK_NOFOLLOW) == 0) {
    core.counters.add(Counter::kTouches);
  } else if (errno != ENOENT) {
    core.errors.add("utimensat", root.full_path(path.c_str()), errno);
  }
}

void Housekeeper::remove_one(Core& core, const BlockId& id) noexcept {
  Root& root = *core.roots[core.place(id)];
  const auto dir = root.ns_dir();
  if (!dir) return;
  const ObjectPath path(id);
  if (unlinkat(dir->get(), path.c_str(), 0) == 0) {
    core.counters.add(Counter::kRemoved);
  } else if (errno != ENOENT && errno != ENOTDIR) {
    core.errors.add("unlink", root.full_path(path.c_str()), errno);
  }
}

bool Housekeeper::stop(Deadline deadline) noexcept {
  {
    std::scoped_lock lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  return join_until(thread_, ended_, deadline);
}

}  // namespace ucm::posix
