// Linux native AIO for direct I/O, for kernels and containers where io_uring is not to be had (common
// seccomp profiles forbid it). Reads and writes are in flight; other steps run in place.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "posix/counters.h"
#include "posix/engine.h"

namespace ucm::posix {
namespace {

long io_setup(unsigned n, aio_context_t* context) noexcept {
  return syscall(SYS_io_setup, n, context) < 0 ? -errno : 0;
}

class AioEngine final : public IoEngine {
 public:
  AioEngine(std::uint32_t depth, std::shared_ptr<Waker> waker)
      : depth_(depth), waker_(std::move(waker)), blocks_(2 * depth), events_(2 * depth) {
    // Twice the depth: a header that says where its shards lie is followed by them at once, when
    // another transfer has its place already.
    const long r = io_setup(2 * depth, &context_);
    if (r < 0) throw std::system_error(static_cast<int>(-r), std::generic_category(), "io_setup");
    for (auto& block : blocks_) free_.push_back(&block);
    batch_.reserve(blocks_.size());
    ready_.reserve(blocks_.size());
  }
  ~AioEngine() override {
    if (!abandoned_) syscall(SYS_io_destroy, context_);
  }

  bool is_async(IoStep kind) const noexcept override {
    return kind == IoStep::kRead || kind == IoStep::kWrite;
  }
  std::uint32_t max_depth() const noexcept override { return depth_; }

  void start(Step* step) noexcept override {
    if (free_.empty() || !is_async(step->kind)) {
      run_step(*step);
      ready_.push_back(step);
      return;
    }
    iocb* block = free_.back();
    free_.pop_back();
    std::memset(block, 0, sizeof *block);
    block->aio_data = reinterpret_cast<std::uint64_t>(step);
    block->aio_lio_opcode = step->kind == IoStep::kRead ? IOCB_CMD_PREADV : IOCB_CMD_PWRITEV;
    block->aio_fildes = static_cast<std::uint32_t>(step->fd);
    block->aio_buf = reinterpret_cast<std::uint64_t>(step->iov);
    block->aio_nbytes = static_cast<std::uint64_t>(step->iov_count);
    block->aio_offset = static_cast<std::int64_t>(step->offset);
    // Completions and wake() share one event counter, so one poll() waits for both.
    block->aio_flags = IOCB_FLAG_RESFD;
    block->aio_resfd = static_cast<std::uint32_t>(waker_->fd());
    batch_.push_back(block);
  }

  void flush() noexcept override {
    std::size_t sent = 0;
    while (sent < batch_.size()) {
      const long r = syscall(SYS_io_submit, context_, batch_.size() - sent, batch_.data() + sent);
      if (r > 0) {
        sent += static_cast<std::size_t>(r);
        continue;
      }
      if (r < 0 && errno == EINTR) continue;
      // The first of the rest was refused: EAGAIN means no kernel memory now, others concern it.
      // Both are answered by doing it in place.
      iocb* block = batch_[sent++];
      auto* step = reinterpret_cast<Step*>(block->aio_data);
      run_step(*step);
      ready_.push_back(step);
      free_.push_back(block);
    }
    batch_.clear();
  }

  void wait(std::chrono::milliseconds timeout, std::vector<Step*>& done) noexcept override {
    flush();
    if (ready_.empty() && timeout.count() != 0) {
      pollfd p{waker_->fd(), POLLIN, 0};
      (void)::poll(&p, 1, timeout.count() < 0 ? -1 : static_cast<int>(timeout.count()));
    }
    waker_->drain();
    done.insert(done.end(), ready_.begin(), ready_.end());
    ready_.clear();
    timespec zero{};
    const long n = syscall(SYS_io_getevents, context_, 0, events_.size(), events_.data(), &zero);
    for (long i = 0; i < n; ++i) {
      auto* step = reinterpret_cast<Step*>(events_[i].data);
      step->result = static_cast<int>(events_[i].res);
      free_.push_back(reinterpret_cast<iocb*>(events_[i].obj));
      done.push_back(step);
    }
  }

  void abandon() noexcept override { abandoned_ = true; }

 private:
  const std::uint32_t depth_;
  std::shared_ptr<Waker> waker_;
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;
  std::vector<io_event> events_;
  std::vector<iocb*> free_;
  std::vector<iocb*> batch_;
  std::vector<Step*> ready_;
  bool abandoned_ = false;
};

}  // namespace

bool probe_aio(std::string& reason) {
  aio_context_t context = 0;
  const long r = io_setup(8, &context);
  if (r < 0) {
    reason = "io_setup: " + errno_text(static_cast<int>(-r));
    if (r == -EAGAIN) reason += "; raise fs.aio-max-nr";
    return false;
  }
  syscall(SYS_io_destroy, context);
  return true;
}

std::unique_ptr<IoEngine> make_aio_engine(std::uint32_t depth, std::shared_ptr<Waker> waker) {
  return std::make_unique<AioEngine>(depth, std::move(waker));
}

}  // namespace ucm::posix
