#include "posix/engine.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace ucm::posix {

Waker::Waker() : fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!fd_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Waker::wake() noexcept {
  const std::uint64_t one = 1;
  // EAGAIN means that the counter is full: the thread is awake anyway.
  if (::write(fd_.get(), &one, sizeof one) < 0) return;
}

void Waker::drain() noexcept {
  std::uint64_t count = 0;
  if (::read(fd_.get(), &count, sizeof count) < 0) return;  // EAGAIN: nothing to drain
}

void run_step(Step& step) noexcept {
  long r = -1;
  do {
    switch (step.kind) {
      case IoStep::kOpenRead:
      case IoStep::kOpenWrite:
        r = ::openat(step.dirfd, step.path, step.flags, 0600);
        break;
      case IoStep::kRead:
        r = ::preadv(step.fd, step.iov, step.iov_count, static_cast<off_t>(step.offset));
        break;
      case IoStep::kWrite:
        r = ::pwritev(step.fd, step.iov, step.iov_count, static_cast<off_t>(step.offset));
        break;
      case IoStep::kSync:
        r = ::fdatasync(step.fd);
        break;
      case IoStep::kClose:
        r = ::close(step.fd);
        // The descriptor is gone whatever close said; repeating it would close a stranger's.
        if (r < 0 && errno == EINTR) r = 0;
        break;
      case IoStep::kRename:
        r = ::renameat(step.dirfd, step.path, step.dirfd, step.path2);
        break;
      case IoStep::kStat:
        r = 0;
        break;
    }
  } while (r < 0 && errno == EINTR);
  step.result = r < 0 ? -errno : static_cast<int>(r);
}

const char* engine_name(EngineKind kind) noexcept {
  switch (kind) {
    case EngineKind::kUring:
      return "io_uring";
    case EngineKind::kAio:
      return "aio";
    case EngineKind::kSync:
      break;
  }
  return "psync";
}

namespace {

/// Runs nothing asynchronously: the worker executes every step in place.
class SyncEngine final : public IoEngine {
 public:
  explicit SyncEngine(std::shared_ptr<Waker> waker) : waker_(std::move(waker)) {}
  bool is_async(IoStep) const noexcept override { return false; }
  std::uint32_t max_depth() const noexcept override { return 1; }
  void start(Step* step) noexcept override {
    run_step(*step);
    ready_.push_back(step);
  }
  void flush() noexcept override {}
  void wait(std::chrono::milliseconds timeout, std::vector<Step*>& done) noexcept override {
    if (ready_.empty() && timeout.count() != 0) {
      pollfd p{waker_->fd(), POLLIN, 0};
      if (::poll(&p, 1, timeout.count() < 0 ? -1 : static_cast<int>(timeout.count())) > 0) {
        waker_->drain();
      }
    }
    done.insert(done.end(), ready_.begin(), ready_.end());
    ready_.clear();
  }

 private:
  std::shared_ptr<Waker> waker_;
  std::vector<Step*> ready_;
};

}  // namespace

std::unique_ptr<IoEngine> make_sync_engine(std::shared_ptr<Waker> waker) {
  return std::make_unique<SyncEngine>(std::move(waker));
}

EngineSupport probe_engines() {
  EngineSupport support;
  support.uring = probe_uring(support.uring_reason);
  support.aio = probe_aio(support.aio_reason);
  return support;
}

EngineChoice choose_engine(const std::string& asked, const EngineSupport& support, bool direct) {
  const auto refuse = [&](const std::string& why) {
    throw PosixSetupError(
        "posix_io_engine=" + asked + " cannot be used: " + why +
            "; choose auto, or one of io_uring, aio, psync that is available here",
        0);
  };
  if (asked == "psync") return {EngineKind::kSync, "as configured"};
  if (asked == "io_uring") {
    if (!support.uring) refuse(support.uring_reason);
    return {EngineKind::kUring, "as configured"};
  }
  if (asked == "aio") {
    if (!support.aio) refuse(support.aio_reason);
    if (!direct) refuse("it needs direct I/O (io_direct, and a file system that takes O_DIRECT)");
    return {EngineKind::kAio, "as configured"};
  }
  if (asked != "auto") refuse("unknown engine");
  if (support.uring) return {EngineKind::kUring, "auto"};
  if (support.aio && direct)
    return {EngineKind::kAio, "auto; no io_uring: " + support.uring_reason};
  return {EngineKind::kSync, "auto; no io_uring: " + support.uring_reason};
}

std::unique_ptr<IoEngine> make_engine(EngineKind kind, std::uint32_t depth,
                                      std::shared_ptr<Waker> waker) {
  switch (kind) {
    case EngineKind::kUring:
      return make_uring_engine(depth, std::move(waker));
    case EngineKind::kAio:
      return make_aio_engine(depth, std::move(waker));
    case EngineKind::kSync:
      break;
  }
  return make_sync_engine(std::move(waker));
}

}  // namespace ucm::posix
