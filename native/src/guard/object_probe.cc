#include "guard/object_probe.h"

#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>

namespace ucm::guard {
namespace {

/// Buffers and answers of one probe. The stage holds it through a sink, so it outlives a probe that gave
/// up.
class Exchange {
 public:
  Exchange(const Geometry& geometry, std::shared_ptr<std::atomic<int>> owed)
      : written(allocate(geometry.object_bytes())),
        read(allocate(geometry.object_bytes())),
        owed_(std::move(owed)) {
    ++*owed_;
  }
  ~Exchange() { --*owed_; }
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void expect(std::uint32_t answers) {
    const std::lock_guard lock(mu_);
    left_ = answers;
    worst_ = {Status::kOk, 0};
  }
  /// Nothing: not answered by then.
  std::optional<Outcome> wait(Deadline deadline) {
    std::unique_lock lock(mu_);
    if (!cv_.wait_until(lock, deadline, [&] { return left_ == 0; })) return std::nullopt;
    return worst_;
  }

  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  const std::unique_ptr<std::byte, Free> written;
  const std::unique_ptr<std::byte, Free> read;

  void answered(std::uint32_t n, Outcome outcome) noexcept {
    const std::lock_guard lock(mu_);
    if (outcome.status != Status::kOk) worst_ = outcome;
    left_ -= n < left_ ? n : left_;
    if (left_ == 0) cv_.notify_all();
  }

 private:
  static std::byte* allocate(std::size_t bytes) {
    void* const p = std::aligned_alloc(kIoAlign, bytes);
    if (p == nullptr) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    return static_cast<std::byte*>(p);
  }

  const std::shared_ptr<std::atomic<int>> owed_;
  std::mutex mu_;
  std::condition_variable cv_;
  std::uint32_t left_ = 0;
  Outcome worst_;
};

class ReadAnswer final : public ReadSink {
 public:
  explicit ReadAnswer(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}
  void on_read(std::uint64_t, std::uint32_t begin, std::uint32_t end,
               Outcome outcome) noexcept override {
    exchange_->answered(end - begin, outcome);
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

class WriteAnswer final : public WriteSink {
 public:
  explicit WriteAnswer(std::shared_ptr<Exchange> exchange) : exchange_(std::move(exchange)) {}
  void on_written(std::uint64_t, Outcome outcome) noexcept override {
    exchange_->answered(1, outcome);
  }

 private:
  const std::shared_ptr<Exchange> exchange_;
};

/// Content that follows from the id, so that what an earlier probe left behind compares equal too.
void fill(std::byte* data, std::size_t bytes, const BlockId& id) {
  std::uint64_t x = id.word() | 1;
  for (std::size_t at = 0; at + sizeof x <= bytes; at += sizeof x) {
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    std::memcpy(data + at, &x, sizeof x);
  }
}

std::string describe(const char* step, const std::optional<Outcome>& outcome) {
  if (!outcome) return std::string(step) + ": no answer in time";
  static constexpr const char* kNames[] = {"ok",       "pending",   "miss",
                                           "corrupt",  "I/O error", "timeout",
                                           "rejected", "cancelled", "closed"};
  std::string out = std::string(step) + ": " + kNames[static_cast<std::size_t>(outcome->status)];
  if (outcome->error != 0) out += std::string(" (") + std::strerror(outcome->error) + ")";
  return out;
}

}  // namespace

ObjectProbe::ObjectProbe() {
  static std::atomic<std::uint64_t> next{0};
  if (::getentropy(id_.bytes.data(), id_.bytes.size()) != 0) {
    // Without entropy: unique in this process, and content addresses never start like this.
    const auto pid = static_cast<std::uint64_t>(::getpid());
    std::memcpy(id_.bytes.data(), &pid, sizeof pid);
  }
  const std::uint64_t n = ++next;
  std::memcpy(id_.bytes.data() + 8, &n, sizeof n);
}

std::string ObjectProbe::run(Stage& stage, Deadline deadline) {
  if (owed_->load() >= kMaxOwed) {
    return "the stage has not answered " + std::to_string(owed_->load()) + " earlier probes";
  }
  const Geometry& geometry = stage.geometry();
  const auto exchange = std::make_shared<Exchange>(geometry, owed_);
  for (std::uint32_t s = 0; s < geometry.shard_count; ++s) {
    fill(exchange->written.get() + geometry.shard_offset(s), geometry.shard_bytes, id_);
  }
  stage.remove({&id_, 1});  // what a probe that gave up may have left
  exchange->expect(1);
  const WriteOp write{id_, exchange->written.get(), 1};
  stage.write({&write, 1}, std::make_shared<WriteAnswer>(exchange), deadline);
  auto outcome = exchange->wait(deadline);
  if (outcome && (outcome->error == ENOSPC || outcome->error == EDQUOT))
    return {};  // full: it serves
  if (!outcome || outcome->status != Status::kOk) return describe("write", outcome);

  exchange->expect(geometry.shard_count);
  const ReadOp read{id_, exchange->read.get(), 0, geometry.shard_count, 2, true};
  stage.read({&read, 1}, std::make_shared<ReadAnswer>(exchange), deadline);
  outcome = exchange->wait(deadline);
  stage.remove({&id_, 1});
  if (!outcome || outcome->status != Status::kOk) return describe("read", outcome);
  for (std::uint32_t s = 0; s < geometry.shard_count; ++s) {
    const std::size_t at = geometry.shard_offset(s);
    if (std::memcmp(exchange->read.get() + at, exchange->written.get() + at,
                    geometry.shard_bytes) != 0) {
      return "compare: shard " + std::to_string(s) + " came back with other bytes";
    }
  }
  return {};
}

}  // namespace ucm::guard
