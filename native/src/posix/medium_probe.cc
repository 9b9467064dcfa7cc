#include "posix/medium_probe.h"

#include <cerrno>
#include <stdexcept>

namespace ucm::posix {

MediumProbe::MediumProbe(std::shared_ptr<Core> core) : core_(std::move(core)) {
  shared_->lanes = std::vector<Lane>(core_->roots.size());
}

std::string MediumProbe::run(Deadline deadline) {
  std::unique_lock lock(shared_->mutex);
  for (std::size_t i = 0; i < shared_->lanes.size(); ++i) {
    Lane& lane = shared_->lanes[i];
    if (shared_->stopping) return "shutting down";
    if (lane.busy) continue;
    if (lane.thread.joinable()) lane.thread.join();  // it has ended but for its last instructions
    lane.failed.clear();
    lane.ours = false;
    lane.thread = std::thread([core = core_, shared = shared_, i] {
      std::string failed;
      const int error = core->roots[i]->try_medium(failed);
      const bool works = error == 0 || error == ENOSPC || error == EDQUOT;  // full, but it serves
      const std::lock_guard answered(shared->mutex);
      shared->lanes[i].busy = false;
      shared->lanes[i].ours = error == EMFILE || error == ENFILE || error == ENOMEM;
      if (!works) {
        shared->lanes[i].failed = failed + " " + core->roots[i]->path() + ": " + errno_text(error);
      }
      shared->done.notify_all();
    });
    lane.busy = true;
  }
  const auto some_works = [&] {
    for (const Lane& lane : shared_->lanes) {
      if (!lane.busy && lane.failed.empty()) return true;
    }
    return false;
  };
  const auto all_answered = [&] {
    for (const Lane& lane : shared_->lanes) {
      if (lane.busy) return false;
    }
    return true;
  };
  // With nothing new to wait for, only the hung ones are left: they have until the deadline too.
  shared_->done.wait_until(lock, deadline,
                           [&] { return shared_->stopping || some_works() || all_answered(); });
  if (some_works()) return {};
  for (const Lane& lane : shared_->lanes) {
    if (lane.ours) throw std::runtime_error("posix: " + lane.failed);
  }
  std::string out;
  for (std::size_t i = 0; i < shared_->lanes.size(); ++i) {
    const Lane& lane = shared_->lanes[i];
    out += (out.empty() ? "" : "; ") +
           (lane.busy ? core_->roots[i]->path() + " does not answer" : lane.failed);
  }
  return out;
}

std::size_t MediumProbe::stop(Deadline deadline) noexcept {
  std::unique_lock lock(shared_->mutex);
  shared_->stopping = true;
  shared_->done.notify_all();
  std::size_t left = 0;
  for (Lane& lane : shared_->lanes) {
    if (!lane.thread.joinable()) continue;
    shared_->done.wait_until(lock, deadline, [&] { return !lane.busy; });
    if (lane.busy) {
      lane.thread.detach();  // it holds core and shared
      ++left;
      continue;
    }
    std::thread thread = std::move(lane.thread);
    lock.unlock();
    thread.join();
    lock.lock();
  }
  return left;
}

}  // namespace ucm::posix
