#include "ucm/fake_stage.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace ucm {

FakeStage::FakeStage(Geometry geometry, std::shared_ptr<FakeMedium> medium, FakeOptions options)
    : geometry_(std::move(geometry)), medium_(std::move(medium)), options_(options) {
  if (medium_ == nullptr || options_.lanes == 0) {
    throw std::invalid_argument("Fake: needs a medium and at least one lane");
  }
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  for (std::uint32_t i = 0; i < options_.lanes; ++i) threads_.emplace_back([this] { lane(); });
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
}

FakeStage::~FakeStage() { shutdown(Clock::now()); }

void FakeStage::lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
                       bool stop_at_first_miss) noexcept {
  std::fill(present.begin(), present.end(), std::uint8_t{0});
  std::size_t asked = 0;
  for (; asked < ids.size(); ++asked) {
    present[asked] = medium_->contains(ids[asked]) ? 1 : 0;
    if (present[asked] == 0 && stop_at_first_miss) break;
  }
  const std::lock_guard lock(mu_);
  lookup_count_ += std::min(asked + 1, ids.size());
}

void FakeStage::submit(std::deque<Op>& queue, Op op) {
  {
    const std::lock_guard lock(mu_);
    if (!closed_) {
      queue.push_back(std::move(op));
      cv_.notify_one();
      return;
    }
  }
  answer(op, {Status::kClosed, 0});
}

void FakeStage::read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
                     Deadline deadline) noexcept {
  for (const ReadOp& op : ops) submit(reads_, {true, op, {}, sink, nullptr, deadline});
}

void FakeStage::write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
                      Deadline deadline) noexcept {
  for (const WriteOp& op : ops) submit(writes_, {false, {}, op, nullptr, sink, deadline});
}

void FakeStage::touch(std::span<const BlockId> ids) noexcept {
  const std::lock_guard lock(mu_);
  touched_ += ids.size();
}

void FakeStage::remove(std::span<const BlockId> ids) noexcept {
  for (const BlockId& id : ids) medium_->remove(id);
}

void FakeStage::answer(const Op& op, Outcome outcome) noexcept {
  if (op.is_read) {
    op.read_sink->on_read(op.read.cookie, op.read.begin, op.read.end, outcome);
  } else {
    op.write_sink->on_written(op.write.cookie, outcome);
  }
}

FakeStage::Planned FakeStage::plan_locked(const Op& op) {
  auto& faults = op.is_read ? read_faults_ : write_faults_;
  if (const auto it = faults.find(op.is_read ? op.read.id : op.write.id); it != faults.end()) {
    const Planned planned = it->second;
    if (--it->second.times == 0) faults.erase(it);
    return planned;
  }
  if (every_.fault != Fault::kNone) return every_;
  const std::uint64_t count = op.is_read ? ++read_count_ : ++write_count_;
  const std::uint32_t nth = op.is_read ? options_.fail_nth_read : options_.fail_nth_write;
  if (nth != 0 && count % nth == 0) return {Fault::kIoError, EIO, 0};
  return {Fault::kNone, 0, 0};
}

void FakeStage::lane() {
  std::unique_lock lock(mu_);
  while (true) {
    cv_.wait(lock, [&] {
      return closed_ ||
             ((!reads_.empty() || !writes_.empty()) && (!options_.manual || steps_ != 0));
    });
    if (closed_) return;
    if (options_.manual) --steps_;
    // Loads go before dumps; prefetches are served after both.
    std::deque<Op>* queue = &reads_;
    if (reads_.empty() || (!reads_.front().read.urgent && !writes_.empty())) queue = &writes_;
    Op op = std::move(queue->front());
    queue->pop_front();
    const Planned planned = plan_locked(op);
    if (planned.fault == Fault::kHang) {
      hung_.push_back(std::move(op));
      continue;
    }
    const std::uint64_t bytes = op.is_read
                                    ? (op.read.end - op.read.begin) * geometry_.shard_stride()
                                    : geometry_.object_bytes();
    auto service = std::chrono::microseconds(options_.latency_us);
    if (options_.bytes_per_second != 0) {
      service += std::chrono::microseconds(bytes * 1'000'000 / options_.bytes_per_second);
    }
    if (Clock::now() > op.deadline) {
      lock.unlock();
      answer(op, {Status::kTimeout, 0});
      lock.lock();
      continue;
    }
    if (service.count() > 0) {
      cv_.wait_until(lock, Clock::now() + service, [&] { return closed_; });
    }
    lock.unlock();
    serve(op, planned.fault, planned.error);
    lock.lock();
  }
}

std::uint64_t FakeStage::checksum(const BlockId& id, const std::byte* shard,
                                  std::uint64_t packed) const noexcept {
  std::uint64_t last;
  std::memcpy(&last, id.bytes.data() + 8, sizeof last);
  const std::uint64_t bytes = packed == 0 ? geometry_.shard_bytes : packed;
  return XXH3_64bits_withSeed(shard, bytes, id.word() ^ last);
}

void FakeStage::serve(const Op& op, Fault fault, int error) {
  Outcome outcome{Status::kOk, 0};
  if (fault == Fault::kIoError) {
    outcome = {Status::kIoError, error};
  } else if (op.is_read && fault == Fault::kMiss) {
    outcome.status = Status::kMiss;
  } else if (op.is_read) {
    const auto object = medium_->get(op.read.id);
    const bool packed = object && std::any_of(object->packed.begin(), object->packed.end(),
                                              [](std::uint64_t n) { return n != 0; });
    if (!object || (packed && op.read.packed == nullptr)) {
      outcome.status = Status::kMiss;
    } else if (object->data.size() != geometry_.object_bytes()) {
      outcome.status = Status::kCorrupt;  // cut, or of another geometry
      medium_->remove(op.read.id);
    } else {
      for (std::uint32_t s = op.read.begin; s < op.read.end; ++s) {
        const std::size_t at = geometry_.shard_offset(s);
        if (op.read.packed != nullptr) op.read.packed[s] = object->packed[s];
        std::memcpy(op.read.into + at, object->data.data() + at, geometry_.shard_bytes);
        if (fault == Fault::kCorrupt) op.read.into[at] ^= std::byte{1};
        if (fault == Fault::kZeroBytes ||
            checksum(op.read.id, op.read.into + at, object->packed[s]) != object->checksums[s]) {
          outcome.status = Status::kCorrupt;
        }
      }
      if (outcome.status == Status::kCorrupt) medium_->remove(op.read.id);  // so a dump heals it
    }
  } else {
    FakeMedium::Object object;
    object.data.assign(op.write.from, op.write.from + geometry_.object_bytes());
    for (std::uint32_t s = 0; s < geometry_.shard_count; ++s) {
      object.packed.push_back(op.write.packed == nullptr ? 0 : op.write.packed[s]);
      object.checksums.push_back(checksum(
          op.write.id, object.data.data() + geometry_.shard_offset(s), object.packed.back()));
    }
    if (!medium_->put(op.write.id, std::move(object))) outcome = {Status::kRejected, ENOSPC};
  }
  if (outcome.status == Status::kOk) {
    const std::lock_guard lock(mu_);
    (op.is_read ? read_bytes_ : written_bytes_) +=
        op.is_read ? (op.read.end - op.read.begin) * geometry_.shard_bytes
                   : geometry_.shard_count * geometry_.shard_bytes;
  }
  answer(op, outcome);
}

void FakeStage::inject(const BlockId& id, bool reads, Fault fault, int error, std::uint32_t times) {
  const std::lock_guard lock(mu_);
  auto& faults = reads ? read_faults_ : write_faults_;
  if (fault == Fault::kNone || times == 0) {
    faults.erase(id);
  } else {
    faults[id] = {fault, error, times};
  }
}

void FakeStage::set_fault(Fault fault, int error) {
  const std::lock_guard lock(mu_);
  every_ = {fault, error, 0};
}

void FakeStage::step(std::uint32_t n) {
  const std::lock_guard lock(mu_);
  steps_ += n;
  cv_.notify_all();
}

std::uint32_t FakeStage::release_hung(bool serve_them) {
  std::vector<Op> ops;
  {
    const std::lock_guard lock(mu_);
    ops.swap(hung_);
  }
  for (const Op& op : ops) serve(op, serve_them ? Fault::kNone : Fault::kIoError, EIO);
  return static_cast<std::uint32_t>(ops.size());
}

std::uint32_t FakeStage::hung() const {
  const std::lock_guard lock(mu_);
  return static_cast<std::uint32_t>(hung_.size());
}

std::uint32_t FakeStage::queued() const {
  const std::lock_guard lock(mu_);
  return static_cast<std::uint32_t>(reads_.size() + writes_.size());
}

void FakeStage::set_latency(std::uint32_t microseconds) {
  const std::lock_guard lock(mu_);
  options_.latency_us = microseconds;
}

std::map<std::string, std::uint64_t> FakeStage::stats() const {
  const std::size_t objects = medium_->size();
  const std::lock_guard lock(mu_);
  return {{"objects", objects},
          {"lookups_total", lookup_count_},
          {"touches_total", touched_},
          {"reads_total", read_count_},
          {"writes_total", write_count_},
          {"read_bytes_total", read_bytes_},
          {"written_bytes_total", written_bytes_},
          {"operations_hung", hung_.size()}};
}

std::string FakeStage::identity() const {
  return std::to_string(::getpid()) + "/" +
         std::to_string(reinterpret_cast<std::uintptr_t>(medium_.get()));
}

std::string FakeStage::health() const {
  const std::lock_guard lock(mu_);
  if (hung_.empty()) return {};
  return "Fake: " + std::to_string(hung_.size()) + " operations hang; release_hung() ends them";
}

void FakeStage::shutdown(Deadline) noexcept {
  std::deque<Op> left;
  {
    const std::lock_guard lock(mu_);
    closed_ = true;
    left.swap(reads_);
    for (Op& op : writes_) left.push_back(std::move(op));
    writes_.clear();
    cv_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const Op& op : left) answer(op, {Status::kClosed, 0});
}

}  // namespace ucm
