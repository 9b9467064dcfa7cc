#include "posix/pool.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>

#include "posix/threads.h"

namespace ucm::posix {

void WorkerPool::ensure_started(const std::function<void(std::shared_ptr<Waker>)>& enlist) {
  std::scoped_lock lock(mutex_);
  if (!entries_.empty() || finishing_) return;
  enlist_ = enlist;
  for (std::size_t i = 0; i < threads_; ++i) {
    try {
      add_locked();
    } catch (...) {
      if (i == 0) throw;  // one thread serves, only slower
      break;
    }
  }
}

void WorkerPool::add_locked() {
  Entry entry;
  entry.worker = factory_();
  entry.ended = std::make_shared<std::atomic<bool>>(false);
  entries_.reserve(entries_.size() + 1);
  enlist_(entry.worker->waker());
  entry.thread = std::thread([worker = entry.worker, ended = entry.ended] {
    worker->run();
    ended->store(true);
  });
  pthread_setname_np(entry.thread.native_handle(),
                     direction_ == Direction::kRead ? "ucm-read" : "ucm-write");
  entries_.push_back(std::move(entry));
}

void WorkerPool::watch(Clock::time_point now, std::chrono::nanoseconds stall) noexcept {
  const auto core = core_.lock();
  if (!core) return;
  std::scoped_lock lock(mutex_);
  if (finishing_) return;
  for (std::size_t i = 0; i < entries_.size();) {
    Entry& entry = entries_[i];
    if (entry.stuck && entry.ended->load()) {  // came back, and its successor is at work
      entry.thread.join();
      core->counters.sub(Counter::kStuckThreads);
      entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(i));
      continue;
    }
    ++i;
  }
  const auto stuck_now = [&] {
    return static_cast<std::size_t>(
        std::count_if(entries_.begin(), entries_.end(), [](const Entry& e) { return e.stuck; }));
  };
  const std::size_t count = entries_.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (entries_[i].stuck || entries_[i].worker->busy_for(now) < stall) continue;
    if (stuck_now() >= kMaxStuck) {
      root_.take_out(direction_, ETIMEDOUT, "I/O threads hang in the kernel");
      continue;
    }
    entries_[i].stuck = true;
    entries_[i].worker->retire();
    core->counters.add(Counter::kStuckThreads);
    core->errors.add("hung I/O", entries_[i].worker->doing(), ETIMEDOUT, "the thread is replaced");
    try {
      add_locked();
      core->counters.add(Counter::kThreadsReplaced);
    } catch (const std::exception& e) {
      core->errors.add("replace I/O thread of", root_.path(), 0, e.what());
    }
  }
}

void WorkerPool::finish() noexcept {
  std::scoped_lock lock(mutex_);
  finishing_ = true;
  for (auto& entry : entries_) entry.worker->finish();
}

std::size_t WorkerPool::join(Deadline deadline) noexcept {
  std::vector<Entry> entries;
  {
    std::scoped_lock lock(mutex_);
    finishing_ = true;
    entries.swap(entries_);
  }
  const auto ended = [](const Entry& e) { return e.ended->load(); };
  while (!std::all_of(entries.begin(), entries.end(), ended) && Clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  for (auto& entry : entries) {
    if (!ended(entry)) entry.worker->abandon();
  }
  // One that waits in its engine leaves at once; one inside a system call cannot be moved.
  const auto grace = Clock::now() + std::chrono::milliseconds(200);
  std::size_t left = 0;
  for (auto& entry : entries) {
    if (!join_until(entry.thread, *entry.ended, grace)) ++left;
  }
  return left;
}

}  // namespace ucm::posix
