#include "compress/state.h"

#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

namespace ucm::compress {
namespace {

constexpr auto kTick = std::chrono::milliseconds(100);
constexpr std::uint64_t kBatchBytes = 256u << 10;

std::uint64_t micros_since(Clock::time_point began) noexcept {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - began).count());
}

}  // namespace

State::State(std::shared_ptr<Stage> stage, const CompressOptions& options, std::uint32_t width,
             std::uint32_t threads, std::size_t buffers)
    : below(std::move(stage)),
      geometry_(below->geometry()),
      options_(options),
      width_(width),
      thread_count_(threads),
      max_buffers_(buffers),
      batch_shards_(static_cast<std::uint32_t>(
          std::max<std::uint64_t>(1, kBatchBytes / geometry_.shard_bytes))) {
  buffers_.reserve(buffers);
  free_buffers_.reserve(buffers);
  threads_.reserve(threads);
}

State::~State() = default;

ReadEntry* State::new_read() noexcept {
  const std::lock_guard lock(mu_);
  if (closing_) return nullptr;
  ReadEntry* entry = nullptr;
  if (!free_reads_.empty()) {
    entry = free_reads_.back();
    free_reads_.pop_back();
  } else {
    try {
      auto made = std::make_unique<ReadEntry>();
      made->packed.resize(geometry_.shard_count);
      made->ready.resize(geometry_.shard_count);
      free_reads_.reserve(read_entries_.size() + 1);
      read_entries_.push_back(std::move(made));
      entry = read_entries_.back().get();
    } catch (...) {
      return nullptr;
    }
  }
  ++below_reads_;
  return entry;
}

WriteEntry* State::new_write() noexcept {  // needs mu_
  if (!free_writes_.empty()) {
    WriteEntry* const entry = free_writes_.back();
    free_writes_.pop_back();
    return entry;
  }
  try {
    auto made = std::make_unique<WriteEntry>();
    made->packed.resize(geometry_.shard_count);
    free_writes_.reserve(write_entries_.size() + 1);
    write_entries_.push_back(std::move(made));
    return write_entries_.back().get();
  } catch (...) {
    return nullptr;
  }
}

void State::read(std::span<const ReadOp> ops, const std::shared_ptr<ReadSink>& sink,
                 Deadline deadline) noexcept {
  for (const ReadOp& op : ops) {
    if (op.into == nullptr || op.begin >= op.end || op.end > geometry_.shard_count ||
        op.packed != nullptr) {
      sink->on_read(op.cookie, op.begin, op.end, {Status::kRejected, EINVAL});
      continue;
    }
    ReadEntry* const entry = new_read();
    if (entry == nullptr) {
      counters_.refused.fetch_add(1);
      sink->on_read(op.cookie, op.begin, op.end, {Status::kClosed, 0});
      continue;
    }
    entry->op = op;
    entry->sink = sink;
    entry->deadline = deadline;
    entry->left = op.end - op.begin;
    entry->waiting = 0;
    ReadOp down = op;
    down.packed = entry->packed.data();
    down.cookie = reinterpret_cast<std::uint64_t>(entry);
    std::fill(entry->packed.begin() + op.begin, entry->packed.begin() + op.end, 0);
    below->read({&down, 1}, shared_from_this(), deadline);
  }
}

void State::on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
                    Outcome outcome) noexcept {
  auto& entry = *reinterpret_cast<ReadEntry*>(cookie);
  if (outcome.status != Status::kOk) return answer(entry, begin, end, outcome);
  std::uint32_t packed = 0;
  for (std::uint32_t i = begin; i < end; ++i) packed += entry.packed[i] != 0 ? 1 : 0;
  if (packed == 0) return answer(entry, begin, end, outcome);
  // What is not packed is there. The last answer may end the entry, so the packed ones go first into
  // the queue, and only while shards of ours are unanswered the entry is looked at.
  std::vector<std::uint8_t>& ready = entry.ready;
  std::uint32_t plain_begin = end;
  for (std::uint32_t i = begin; i <= end; ++i) {
    const bool plain = i < end && entry.packed[i] == 0;
    if (plain && plain_begin == end) plain_begin = i;
    if (plain || plain_begin == end) continue;
    const std::uint32_t from = plain_begin;
    plain_begin = end;
    answer(entry, from, i, outcome);  // packed ones are left
  }
  bool refused = false;
  {
    const std::lock_guard lock(mu_);
    refused = stop_ || !start_threads();
    if (!refused) {
      for (std::uint32_t i = begin; i < end; ++i) ready[i] = entry.packed[i] != 0 ? 1 : 0;
      const bool queued = entry.waiting > 0;
      entry.scan = queued ? std::min(entry.scan, begin) : begin;
      entry.waiting += packed;
      if (!queued) ready_[entry.op.urgent ? 0 : 1].push(entry);
    }
  }
  if (!refused) {
    packed > batch_shards_ ? work_.notify_all() : work_.notify_one();
    return;
  }
  // The threads are gone (a stage below that answered after the shutdown), or never came.
  std::uint32_t left = packed;
  for (std::uint32_t i = begin; left > 0 && i < end; ++i) {
    if (entry.packed[i] == 0) continue;
    --left;
    answer(entry, i, i + 1, {Status::kClosed, 0});
  }
}

bool State::take_read(ReadPart& part) noexcept {
  for (Queue<ReadEntry>& queue : ready_) {
    ReadEntry* const entry = queue.first;
    if (entry == nullptr) continue;
    std::uint32_t i = entry->scan;
    while (entry->ready[i] == 0) ++i;
    part.entry = entry;
    part.begin = i;
    while (i < entry->op.end && entry->ready[i] != 0 && i - part.begin < batch_shards_) {
      entry->ready[i++] = 0;
    }
    part.end = i;
    entry->scan = i;
    entry->waiting -= part.end - part.begin;
    if (entry->waiting == 0) queue.pop();
    return true;
  }
  return false;
}

void State::unpack(Packer& packer, const ReadPart& part) noexcept {
  ReadEntry& entry = *part.entry;
  const auto began = Clock::now();
  if (began > entry.deadline) {
    counters_.timeouts.fetch_add(1);
    return answer(entry, part.begin, part.end, {Status::kTimeout, 0});
  }
  const BlockId id = entry.op.id;
  for (std::uint32_t i = part.begin; i < part.end; ++i) {
    std::byte* const place = entry.op.into + geometry_.shard_offset(i);
    Outcome outcome{Status::kOk, 0};
    switch (packer.unpack(place, entry.packed[i])) {
      case Unpacked::kOk:
        counters_.unpacked_shards.fetch_add(1, std::memory_order_relaxed);
        counters_.unpacked_bytes.fetch_add(geometry_.shard_bytes, std::memory_order_relaxed);
        break;
      case Unpacked::kUnknown:
        counters_.unknown.fetch_add(1);
        outcome.status = Status::kMiss;
        break;
      case Unpacked::kDamaged:
        counters_.damaged.fetch_add(1);
        outcome.status = Status::kCorrupt;
        below->remove({&id, 1});  // so that the next dump writes it anew
        break;
    }
    if (i + 1 == part.end) counters_.unpack_us.fetch_add(micros_since(began));
    answer(entry, i, i + 1, outcome);
  }
}

void State::answer(ReadEntry& entry, std::uint32_t begin, std::uint32_t end,
                   Outcome outcome) noexcept {
  entry.sink->on_read(entry.op.cookie, begin, end, outcome);
  std::shared_ptr<ReadSink> gone;
  {
    const std::lock_guard lock(mu_);
    entry.left -= end - begin;
    if (entry.left > 0) return;
    gone = std::move(entry.sink);
    free_reads_.push_back(&entry);  // its room was reserved with the entry
    if (--below_reads_ == 0) idle_.notify_all();
  }
}

void State::write(std::span<const WriteOp> ops, const std::shared_ptr<WriteSink>& sink,
                  Deadline deadline) noexcept {
  for (const WriteOp& op : ops) {
    Outcome refused{Status::kOk, 0};
    {
      const std::lock_guard lock(mu_);
      WriteEntry* entry = nullptr;
      if (op.from == nullptr || op.packed != nullptr) {
        refused = {Status::kRejected, EINVAL};
      } else if (closing_) {
        refused.status = Status::kClosed;
      } else if (writes_.size >= kQueueLimit) {
        refused.status = Status::kRejected;
      } else if ((entry = new_write()) == nullptr) {
        refused = {Status::kIoError, ENOMEM};
      } else {
        entry->op = op;
        entry->sink = sink;
        entry->deadline = deadline;
        writes_.push(*entry);
        if (!start_threads()) {
          refused = {Status::kIoError, EAGAIN};  // no thread ever ran: it is the only one waiting
          (void)writes_.pop();
          entry->sink.reset();
          free_writes_.push_back(entry);
        }
      }
    }
    if (refused.status == Status::kOk) {
      work_.notify_one();
      continue;
    }
    counters_.refused.fetch_add(1);
    sink->on_written(op.cookie, refused);
  }
}

void State::pack(Packer& packer, WriteEntry& entry) noexcept {
  const auto began = Clock::now();
  if (began > entry.deadline) {
    counters_.timeouts.fetch_add(1);
    return answer(entry, {Status::kTimeout, 0});
  }
  if (entry.buffer == nullptr) return answer(entry, {Status::kIoError, ENOMEM});
  std::uint64_t out = 0;
  std::uint32_t plain = 0;
  for (std::uint32_t i = 0; i < geometry_.shard_count; ++i) {
    const std::uint64_t at = geometry_.shard_offset(i);
    const std::uint64_t n = packer.pack(entry.op.from + at, entry.buffer + at);
    entry.packed[i] = n;
    if (n == 0) {
      ++plain;
      std::memcpy(entry.buffer + at, entry.op.from + at, geometry_.shard_stride());
    } else {
      std::memset(entry.buffer + at + n, 0, align_up(n, kIoAlign) - n);
    }
    out += n == 0 ? geometry_.shard_bytes : n;
  }
  const bool all_plain = plain == geometry_.shard_count;
  counters_.objects.fetch_add(1, std::memory_order_relaxed);
  counters_.plain_objects.fetch_add(all_plain ? 1 : 0, std::memory_order_relaxed);
  counters_.plain_shards.fetch_add(plain, std::memory_order_relaxed);
  counters_.in_bytes.fetch_add(geometry_.shard_bytes * geometry_.shard_count,
                               std::memory_order_relaxed);
  counters_.out_bytes.fetch_add(out, std::memory_order_relaxed);
  counters_.pack_us.fetch_add(micros_since(began), std::memory_order_relaxed);
  WriteOp down = entry.op;
  down.cookie = reinterpret_cast<std::uint64_t>(&entry);
  down.from = entry.buffer;
  down.packed = all_plain ? nullptr : entry.packed.data();
  below->write({&down, 1}, shared_from_this(), entry.deadline);
}

void State::on_written(std::uint64_t cookie, Outcome outcome) noexcept {
  answer(*reinterpret_cast<WriteEntry*>(cookie), outcome);
}

void State::answer(WriteEntry& entry, Outcome outcome) noexcept {
  entry.sink->on_written(entry.op.cookie, outcome);
  std::shared_ptr<WriteSink> gone;
  {
    const std::lock_guard lock(mu_);
    gone = std::move(entry.sink);
    if (entry.buffer != nullptr) free_buffers_.push_back(entry.buffer);
    entry.buffer = nullptr;
    free_writes_.push_back(&entry);
    if (--below_writes_ == 0) idle_.notify_all();
  }
  work_.notify_one();
}

bool State::can_pack() const noexcept {
  return writes_.size > 0 && (!free_buffers_.empty() || buffers_.size() < max_buffers_);
}

bool State::start_threads() noexcept {
  if (!threads_.empty()) return true;
  sigset_t all;
  sigset_t old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // signals belong to the threads of the host program
  try {
    for (std::uint32_t i = 0; i < thread_count_; ++i) {
      auto ended = std::make_shared<std::atomic<bool>>(false);
      threads_.push_back({std::thread([state = shared_from_this(), ended] {
                            state->run();
                            ended->store(true);
                          }),
                          ended});
      pthread_setname_np(threads_.back().thread.native_handle(), "ucm-compress");
    }
  } catch (...) {  // fewer are slower
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  return !threads_.empty();
}

void State::run() noexcept {
  std::unique_ptr<Packer> packer;
  try {
    packer = std::make_unique<Packer>(geometry_.shard_bytes, geometry_.packed_limit(),
                                      options_.codec, options_.level, width_);
  } catch (...) {
    // Without memory to work in this thread ends operations instead of leaving them to wait.
  }
  std::unique_lock lock(mu_);
  while (!stop_) {
    ReadPart part;
    if (take_read(part)) {
      ++working_;
      lock.unlock();
      if (packer != nullptr) {
        unpack(*packer, part);
      } else {
        answer(*part.entry, part.begin, part.end, {Status::kIoError, ENOMEM});
      }
      lock.lock();
    } else if (can_pack()) {
      WriteEntry& entry = *writes_.pop();
      ++working_;
      ++below_writes_;
      if (!free_buffers_.empty()) {
        entry.buffer = free_buffers_.back();
        free_buffers_.pop_back();
      } else if (packer != nullptr) {
        buffers_.emplace_back(
            static_cast<std::byte*>(std::aligned_alloc(kIoAlign, geometry_.object_bytes())),
            std::free);
        entry.buffer = buffers_.back().get();
        if (entry.buffer == nullptr) buffers_.pop_back();
      }
      lock.unlock();
      if (packer != nullptr) {
        pack(*packer, entry);
      } else {
        answer(entry, {Status::kIoError, ENOMEM});
      }
      lock.lock();
    } else if (writes_.size > 0) {
      // All buffers are under way below: nothing to do but to see that nobody waits too long.
      work_.wait_for(lock, kTick);
      if (!can_pack() && writes_.first != nullptr && writes_.first->deadline < Clock::now()) {
        WriteEntry& late = *writes_.pop();
        ++below_writes_;
        ++working_;
        counters_.timeouts.fetch_add(1);
        lock.unlock();
        answer(late, {Status::kTimeout, 0});
        lock.lock();
      } else {
        continue;
      }
    } else {
      work_.wait(lock);
      continue;
    }
    if (--working_ == 0) idle_.notify_all();
  }
}

void State::shutdown(Deadline deadline) noexcept {
  std::unique_lock lock(mu_);
  if (closing_) return;
  closing_ = true;
  idle_.wait_until(lock, deadline, [&] { return writes_.size == 0 && working_ == 0; });
  while (WriteEntry* const entry = writes_.pop()) {
    ++below_writes_;
    lock.unlock();
    answer(*entry, {Status::kClosed, 0});
    lock.lock();
  }
  lock.unlock();
  below->shutdown(deadline);
  lock.lock();
  // What has been read is unpacked in a moment; what the stage below could not end is not waited for.
  const Deadline grace = std::max(deadline, Clock::now() + std::chrono::milliseconds(200));
  const auto through = [&] { return ready_[0].size == 0 && ready_[1].size == 0 && working_ == 0; };
  idle_.wait_until(lock, grace, through);
  stop_ = true;
  ReadPart part;
  while (take_read(part)) {
    lock.unlock();
    answer(*part.entry, part.begin, part.end, {Status::kClosed, 0});
    lock.lock();
  }
  lock.unlock();
  work_.notify_all();
  const Deadline last = std::max(deadline, Clock::now() + std::chrono::seconds(1));
  for (Thread& t : threads_) {
    while (!t.ended->load() && Clock::now() < last) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (t.ended->load()) {
      t.thread.join();
    } else {
      t.thread.detach();
      stuck_.fetch_add(1);
    }
  }
  threads_.clear();
}

void State::add_stats(std::map<std::string, std::uint64_t>& out) const {
  const Counters& c = counters_;
  out["compress_objects_total"] = c.objects;
  out["compress_plain_objects_total"] = c.plain_objects;
  out["compress_plain_shards_total"] = c.plain_shards;
  out["compress_in_bytes_total"] = c.in_bytes;
  out["compress_out_bytes_total"] = c.out_bytes;
  out["compress_us_total"] = c.pack_us;
  out["decompress_shards_total"] = c.unpacked_shards;
  out["decompress_bytes_total"] = c.unpacked_bytes;
  out["decompress_us_total"] = c.unpack_us;
  out["decompress_damaged_total"] = c.damaged;
  out["decompress_unknown_total"] = c.unknown;
  out["compress_timeouts_total"] = c.timeouts;
  out["compress_refused_total"] = c.refused;
  out["compress_stuck_threads"] = stuck_.load();
  const std::lock_guard lock(mu_);
  out["compress_queue"] = writes_.size;
  out["compress_buffers"] = buffers_.size();
  out["compress_buffers_in_use"] = buffers_.size() - free_buffers_.size();
}

}  // namespace ucm::compress
