// Fixed depth of O_DIRECT operations through one io_uring with registered buffers.
#pragma once

#include <liburing.h>
#include <sys/mman.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace ucm::bench {

[[noreturn]] inline void fail(const std::string& what, int error) {
  throw std::runtime_error(what + ": " + std::strerror(error));
}

/// `depth` buffers of `io_bytes`, each with at most one operation in flight.
class Ring {
 public:
  Ring(std::size_t depth, std::size_t io_bytes) : io_bytes_(io_bytes) {
    void* memory = nullptr;
    constexpr std::size_t kHuge = 2u << 20;
    if (posix_memalign(&memory, kHuge, depth * io_bytes) != 0) fail("posix_memalign", ENOMEM);
    memory_.reset(static_cast<std::byte*>(memory));
    // The best case for the device: few, large pieces.
    (void)madvise(memory, depth * io_bytes / kHuge * kHuge, MADV_HUGEPAGE);
    std::memset(memory, 0x5a, depth * io_bytes);
    if (const int error = io_uring_queue_init(static_cast<unsigned>(2 * depth), &ring_, 0); error) {
      fail("io_uring_queue_init", -error);
    }
    std::vector<iovec> vectors;
    for (std::size_t i = 0; i < depth; ++i) {
      vectors.push_back({buffer(i), io_bytes});
      free_.push_back(i);
    }
    if (const int error =
            io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(depth));
        error) {
      io_uring_queue_exit(&ring_);
      fail("io_uring_register_buffers", -error);
    }
  }
  ~Ring() { io_uring_queue_exit(&ring_); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  /// Runs operations 0..count-1 in order, at most `depth` at a time.
  /// start(index) -> (file descriptor, offset); done(index) after its bytes have moved.
  template <typename Start, typename Done>
  void run(std::size_t count, bool write, Start start, Done done) {
    std::vector<std::size_t> index_of(free_.size());
    std::size_t started = 0, finished = 0;
    while (finished < count) {
      while (!free_.empty() && started < count) {
        const std::size_t slot = free_.back();
        free_.pop_back();
        index_of[slot] = started;
        const auto [fd, offset] = start(started++);
        io_uring_sqe* entry = io_uring_get_sqe(&ring_);
        const auto length = static_cast<unsigned>(io_bytes_);
        if (write) {
          io_uring_prep_write_fixed(entry, fd, buffer(slot), length, offset,
                                    static_cast<int>(slot));
        } else {
          io_uring_prep_read_fixed(entry, fd, buffer(slot), length, offset, static_cast<int>(slot));
        }
        io_uring_sqe_set_data(entry, reinterpret_cast<void*>(slot));
      }
      if (const int submitted = io_uring_submit_and_wait(&ring_, 1); submitted < 0) {
        fail("io_uring_submit_and_wait", -submitted);
      }
      io_uring_cqe* completion = nullptr;
      while (io_uring_peek_cqe(&ring_, &completion) == 0) {
        const auto slot = reinterpret_cast<std::size_t>(io_uring_cqe_get_data(completion));
        const int moved = completion->res;
        io_uring_cqe_seen(&ring_, completion);
        if (moved < 0) fail("O_DIRECT operation", -moved);
        if (static_cast<std::size_t>(moved) != io_bytes_) fail("short O_DIRECT operation", EIO);
        done(index_of[slot]);
        free_.push_back(slot);
        ++finished;
      }
    }
  }

 private:
  struct Free {
    void operator()(std::byte* p) const noexcept { std::free(p); }
  };
  [[nodiscard]] std::byte* buffer(std::size_t i) const noexcept {
    return memory_.get() + i * io_bytes_;
  }

  std::size_t io_bytes_;
  std::unique_ptr<std::byte, Free> memory_;
  io_uring ring_{};
  std::vector<std::size_t> free_;
};

}  // namespace ucm::bench
