// io_uring: opens, reads, writes, flushes and renames in flight from one thread.
#include <poll.h>

#include <cerrno>
#include <system_error>

#include "posix/counters.h"
#include "posix/engine.h"

#ifdef UCM_HAVE_URING
#include <liburing.h>

namespace ucm::posix {
namespace {

constexpr int kNeededOps[] = {IORING_OP_READV,  IORING_OP_WRITEV,   IORING_OP_FSYNC,
                              IORING_OP_OPENAT, IORING_OP_RENAMEAT, IORING_OP_CLOSE,
                              IORING_OP_READ};

int set_up(io_uring& ring, unsigned entries) noexcept {
  // Newest flags first: completions are then run by our own thread when it asks for them, without
  // interrupts. Older kernels refuse flags that they do not know.
  constexpr unsigned kTries[] = {
#ifdef IORING_SETUP_DEFER_TASKRUN
      IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_CLAMP,
#endif
      IORING_SETUP_CLAMP,
  };
  int r = -EINVAL;
  for (const unsigned flags : kTries) {
    io_uring_params params{};
    params.flags = flags;
    r = io_uring_queue_init_params(entries, &ring, &params);
    if (r == 0) {
      if ((params.features & IORING_FEAT_EXT_ARG) != 0 &&
          (params.features & IORING_FEAT_NODROP) != 0) {
        return 0;
      }
      io_uring_queue_exit(&ring);
      return -ENOSYS;
    }
    if (r != -EINVAL) return r;
  }
  return r;
}

class UringEngine final : public IoEngine {
 public:
  UringEngine(std::uint32_t depth, std::shared_ptr<Waker> waker)
      : depth_(depth), waker_(std::move(waker)) {
    const int r = set_up(ring_, depth + 8);
    if (r < 0) throw std::system_error(-r, std::generic_category(), "io_uring_queue_init");
    // Steps that the kernel cannot start without blocking run on its worker threads: enough of them
    // for every step of this ring, or creates and renames would queue behind each other.
    unsigned workers[2] = {depth, 0};
    (void)io_uring_register_iowq_max_workers(&ring_, workers);  // before 5.15: the default stays
  }
  ~UringEngine() override {
    if (!abandoned_) io_uring_queue_exit(&ring_);
  }

  bool is_async(IoStep kind) const noexcept override { return kind != IoStep::kStat; }
  std::uint32_t max_depth() const noexcept override { return depth_; }

  void start(Step* step) noexcept override {
    io_uring_sqe* sqe = get_sqe();
    if (sqe == nullptr) {  // cannot happen while in flight <= depth; stay correct anyway
      run_step(*step);
      ready_.push_back(step);
      return;
    }
    switch (step->kind) {
      case IoStep::kOpenRead:
      case IoStep::kOpenWrite:
        io_uring_prep_openat(sqe, step->dirfd, step->path, step->flags, 0600);
        break;
      case IoStep::kRead:
        io_uring_prep_readv(sqe, step->fd, step->iov, static_cast<unsigned>(step->iov_count),
                            step->offset);
        break;
      case IoStep::kWrite:
        io_uring_prep_writev(sqe, step->fd, step->iov, static_cast<unsigned>(step->iov_count),
                             step->offset);
        break;
      case IoStep::kSync:
        io_uring_prep_fsync(sqe, step->fd, IORING_FSYNC_DATASYNC);
        break;
      case IoStep::kClose:
        io_uring_prep_close(sqe, step->fd);
        break;
      case IoStep::kRename:
        io_uring_prep_renameat(sqe, step->dirfd, step->path, step->dirfd, step->path2, 0);
        break;
      case IoStep::kStat:
        io_uring_prep_nop(sqe);
        break;
    }
    io_uring_sqe_set_data(sqe, step);
  }

  void flush() noexcept override { submit(); }

  void wait(std::chrono::milliseconds timeout, std::vector<Step*>& done) noexcept override {
    done.insert(done.end(), ready_.begin(), ready_.end());
    const bool have = !ready_.empty();
    ready_.clear();
    if (!wake_armed_) arm_wake();
    if (have || timeout.count() == 0) {
      submit();
      (void)io_uring_get_events(&ring_);
    } else {
      __kernel_timespec ts{};
      ts.tv_sec = timeout.count() / 1000;
      ts.tv_nsec = (timeout.count() % 1000) * 1'000'000;
      io_uring_cqe* first = nullptr;
      // -ETIME, -EINTR and -EBUSY all mean: look at what has completed and come back.
      (void)io_uring_submit_and_wait_timeout(&ring_, &first, 1, timeout.count() < 0 ? nullptr : &ts,
                                             nullptr);
    }
    unsigned head = 0;
    unsigned seen = 0;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++seen;
      auto* step = static_cast<Step*>(io_uring_cqe_get_data(cqe));
      if (step == nullptr) {
        // Drained here and nowhere else: a wake that comes later must fire the next poll, because
        // the caller may have looked at its queue already.
        waker_->drain();
        wake_armed_ = false;
        continue;
      }
      step->result = cqe->res;
      done.push_back(step);
    }
    io_uring_cq_advance(&ring_, seen);
  }

  void abandon() noexcept override { abandoned_ = true; }

 private:
  io_uring_sqe* get_sqe() noexcept {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      submit();
      sqe = io_uring_get_sqe(&ring_);
    }
    return sqe;
  }
  void submit() noexcept { (void)io_uring_submit(&ring_); }  // what is left goes with the next one
  void arm_wake() noexcept {
    io_uring_sqe* sqe = get_sqe();
    if (sqe == nullptr) return;
    io_uring_prep_poll_add(sqe, waker_->fd(), POLLIN);
    io_uring_sqe_set_data(sqe, nullptr);
    wake_armed_ = true;
  }

  const std::uint32_t depth_;
  std::shared_ptr<Waker> waker_;
  io_uring ring_{};
  bool wake_armed_ = false;
  bool abandoned_ = false;
  std::vector<Step*> ready_;
};

}  // namespace

bool probe_uring(std::string& reason) {
  io_uring ring{};
  const int r = set_up(ring, 8);
  if (r < 0) {
    reason = "io_uring_setup: " + errno_text(-r);
    if (r == -EPERM) reason += "; a seccomp profile or kernel.io_uring_disabled forbids it";
    if (r == -ENOSYS) reason += "; the kernel is older than 5.11";
    return false;
  }
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  bool all = probe != nullptr;
  for (const int op : kNeededOps) all = all && io_uring_opcode_supported(probe, op) != 0;
  if (probe != nullptr) io_uring_free_probe(probe);
  io_uring_queue_exit(&ring);
  if (!all) reason = "the kernel's io_uring lacks an operation (openat, renameat, ...)";
  return all;
}

std::unique_ptr<IoEngine> make_uring_engine(std::uint32_t depth, std::shared_ptr<Waker> waker) {
  return std::make_unique<UringEngine>(depth, std::move(waker));
}

}  // namespace ucm::posix

#else  // UCM_HAVE_URING

namespace ucm::posix {

bool probe_uring(std::string& reason) {
  reason = "built without liburing";
  return false;
}

std::unique_ptr<IoEngine> make_uring_engine(std::uint32_t, std::shared_ptr<Waker>) {
  throw std::system_error(ENOSYS, std::generic_category(), "built without liburing");
}

}  // namespace ucm::posix

#endif
