// What the threads of a Compress stage share with it: operations on their way, queues, buffers.
//
// A read goes down first; of what comes back, shards that are not packed are answered at once and the
// others wait in `ready` for a thread. A write waits in `writes` for a thread and a buffer, goes down
// packed, and gives its buffer back when the stage below has answered.
//
// One mutex guards all of it: it is held for list operations only. Sinks and the stage below are called
// without it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "compress/packer.h"
#include "ucm/compress.h"

namespace ucm::compress {

/// Of a singly linked queue of entries with a `next`.
template <class T>
struct Queue {
  T* first = nullptr;
  T* last = nullptr;
  std::size_t size = 0;

  void push(T& entry) noexcept {
    entry.next = nullptr;
    (first == nullptr ? first : last->next) = &entry;
    last = &entry;
    ++size;
  }
  T* pop() noexcept {
    T* const entry = first;
    if (entry == nullptr) return nullptr;
    first = entry->next;
    --size;
    return entry;
  }
};

struct ReadEntry {
  ReadOp op;  ///< as the caller gave it
  std::shared_ptr<ReadSink> sink;
  Deadline deadline{};
  std::vector<std::uint64_t> packed;  ///< per shard, filled by the stage below
  std::vector<std::uint8_t> ready;    ///< per shard: read, waits for a thread
  std::uint32_t scan = 0;             ///< no ready shard lies before
  std::uint32_t waiting = 0;          ///< ready shards
  std::uint32_t left = 0;             ///< shards without an answer
  ReadEntry* next = nullptr;
};

struct WriteEntry {
  WriteOp op;
  std::shared_ptr<WriteSink> sink;
  Deadline deadline{};
  std::vector<std::uint64_t> packed;
  std::byte* buffer = nullptr;
  WriteEntry* next = nullptr;
};

/// Shards [begin, end) of an entry, taken by a thread.
struct ReadPart {
  ReadEntry* entry = nullptr;
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

struct Counters {
  std::atomic<std::uint64_t> objects{0};
  std::atomic<std::uint64_t> plain_objects{0};
  std::atomic<std::uint64_t> plain_shards{0};
  std::atomic<std::uint64_t> in_bytes{0};
  std::atomic<std::uint64_t> out_bytes{0};
  std::atomic<std::uint64_t> pack_us{0};
  std::atomic<std::uint64_t> unpacked_shards{0};
  std::atomic<std::uint64_t> unpacked_bytes{0};
  std::atomic<std::uint64_t> unpack_us{0};
  std::atomic<std::uint64_t> damaged{0};
  std::atomic<std::uint64_t> unknown{0};
  std::atomic<std::uint64_t> timeouts{0};
  std::atomic<std::uint64_t> refused{0};
};

class State final : public ReadSink, public WriteSink, public std::enable_shared_from_this<State> {
 public:
  /// Operations that wait to be packed; more are refused.
  static constexpr std::size_t kQueueLimit = 65'536;

  State(std::shared_ptr<Stage> stage, const CompressOptions& options, std::uint32_t width,
        std::uint32_t threads, std::size_t buffers);
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void read(std::span<const ReadOp> ops, const std::shared_ptr<ReadSink>& sink,
            Deadline deadline) noexcept;
  void write(std::span<const WriteOp> ops, const std::shared_ptr<WriteSink>& sink,
             Deadline deadline) noexcept;
  void on_read(std::uint64_t cookie, std::uint32_t begin, std::uint32_t end,
               Outcome outcome) noexcept override;
  void on_written(std::uint64_t cookie, Outcome outcome) noexcept override;
  void shutdown(Deadline deadline) noexcept;
  void add_stats(std::map<std::string, std::uint64_t>& out) const;
  [[nodiscard]] std::uint64_t stuck() const noexcept { return stuck_.load(); }

  const std::shared_ptr<Stage> below;

 private:
  struct Thread {
    std::thread thread;
    std::shared_ptr<std::atomic<bool>> ended;
  };

  void run() noexcept;
  bool start_threads() noexcept;  // needs mu_
  [[nodiscard]] bool can_pack() const noexcept;
  bool take_read(ReadPart& part) noexcept;  // needs mu_
  void unpack(Packer& packer, const ReadPart& part) noexcept;
  void pack(Packer& packer, WriteEntry& entry) noexcept;
  void answer(ReadEntry& entry, std::uint32_t begin, std::uint32_t end, Outcome outcome) noexcept;
  void answer(WriteEntry& entry, Outcome outcome) noexcept;
  ReadEntry* new_read() noexcept;
  WriteEntry* new_write() noexcept;

  const Geometry& geometry_;
  const CompressOptions options_;
  const std::uint32_t width_;
  const std::uint32_t thread_count_;
  const std::size_t max_buffers_;
  const std::uint32_t batch_shards_;  ///< small shards are unpacked several at a time
  Counters counters_;
  std::atomic<std::uint64_t> stuck_{0};

  mutable std::mutex mu_;
  std::condition_variable work_;
  std::condition_variable idle_;
  bool closing_ = false;
  bool stop_ = false;
  Queue<ReadEntry> ready_[2];  ///< urgent, and prefetches
  Queue<WriteEntry> writes_;
  std::size_t working_ = 0;
  std::size_t below_reads_ = 0;
  std::size_t below_writes_ = 0;
  std::vector<std::unique_ptr<ReadEntry>> read_entries_;
  std::vector<std::unique_ptr<WriteEntry>> write_entries_;
  std::vector<ReadEntry*> free_reads_;
  std::vector<WriteEntry*> free_writes_;
  std::vector<std::unique_ptr<std::byte, void (*)(void*)>> buffers_;
  std::vector<std::byte*> free_buffers_;
  std::vector<Thread> threads_;
};

}  // namespace ucm::compress
