// An in-memory last stage with a stated fault model: for tests of everything above it.
//
// FakeMedium is what survives a restart: several stages may share one, in one process. FakeStage
// serves it with `lanes` threads (reads before writes), a service time of latency + bytes / rate
// per operation, injected faults, and optionally manual completion.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ucm/stage.h"

namespace ucm {

/// Stored objects with a checksum per shard. Thread-safe. The methods are also the raw access of
/// tests, which bypasses every stage.
class FakeMedium {
 public:
  struct Object {
    std::vector<std::byte> data;           ///< Geometry::object_bytes()
    std::vector<std::uint64_t> checksums;  ///< per shard, seeded with the id
    std::vector<std::uint64_t> packed;     ///< per shard its bytes where packed, else 0
  };

  /// false: full.
  bool put(const BlockId& id, Object object);
  [[nodiscard]] std::optional<Object> get(const BlockId& id) const;
  [[nodiscard]] bool contains(const BlockId& id) const;
  [[nodiscard]] std::vector<BlockId> ids() const;
  bool remove(const BlockId& id);
  /// Flip the byte at `offset` without updating the checksum; false when there is no such object.
  bool corrupt(const BlockId& id, std::size_t offset);
  /// Cut the data after `bytes`.
  bool truncate(const BlockId& id, std::size_t bytes);
  /// Exchange what is stored under two ids.
  bool swap(const BlockId& a, const BlockId& b);
  void clear();
  void set_capacity(std::size_t objects);  ///< 0: unlimited
  [[nodiscard]] std::size_t size() const;

 private:
  mutable std::mutex mu_;
  std::unordered_map<BlockId, Object, BlockIdHash> objects_;
  std::size_t capacity_ = 0;
};

enum class Fault : std::uint8_t {
  kNone = 0,
  kIoError = 1,    ///< fails with the given errno
  kCorrupt = 2,    ///< reads: the bytes fail verification
  kZeroBytes = 3,  ///< reads: the medium answers with nothing: fails verification
  kMiss = 4,       ///< reads: not found although it is there
  kHang = 5,       ///< never ends until release_hung()
};

struct FakeOptions {
  std::uint32_t latency_us = 0;
  std::uint64_t bytes_per_second = 0;  ///< 0: unlimited
  std::uint32_t lanes = 1;
  std::uint32_t fail_nth_read = 0;   ///< every n-th read fails with EIO; 0: none
  std::uint32_t fail_nth_write = 0;  ///< likewise
  bool manual = false;               ///< operations wait for step()
};

class FakeStage final : public Stage {
 public:
  FakeStage(Geometry geometry, std::shared_ptr<FakeMedium> medium, FakeOptions options);
  ~FakeStage() override;
  FakeStage(const FakeStage&) = delete;
  FakeStage& operator=(const FakeStage&) = delete;

  const Geometry& geometry() const noexcept override { return geometry_; }
  std::string name() const override { return "Fake"; }
  /// The medium lives in this process alone.
  std::string identity() const override;
  bool keep_packed() noexcept override { return true; }
  void lookup(std::span<const BlockId> ids, std::span<std::uint8_t> present,
              bool stop_at_first_miss) noexcept override;
  void read(std::span<const ReadOp> ops, std::shared_ptr<ReadSink> sink,
            Deadline deadline) noexcept override;
  void write(std::span<const WriteOp> ops, std::shared_ptr<WriteSink> sink,
             Deadline deadline) noexcept override;
  void touch(std::span<const BlockId> ids) noexcept override;
  void remove(std::span<const BlockId> ids) noexcept override;
  std::map<std::string, std::uint64_t> stats() const override;
  std::string health() const override;
  void shutdown(Deadline deadline) noexcept override;

  // ---- controls of tests ----
  /// The next `times` operations (reads when `reads`, else writes) on `id` meet `fault`.
  void inject(const BlockId& id, bool reads, Fault fault, int error, std::uint32_t times);
  /// Every operation from now on meets `fault` (kNone: none), beside what inject() planned.
  void set_fault(Fault fault, int error);
  /// Manual mode: let `n` queued operations run (they are taken in the usual order).
  void step(std::uint32_t n);
  /// End hung operations: with their true result when `serve`, else with EIO. Works after shutdown.
  std::uint32_t release_hung(bool serve);
  [[nodiscard]] std::uint32_t hung() const;
  [[nodiscard]] std::uint32_t queued() const;
  void set_latency(std::uint32_t microseconds);
  [[nodiscard]] const std::shared_ptr<FakeMedium>& medium() const noexcept { return medium_; }

 private:
  struct Op {
    bool is_read = false;
    ReadOp read;
    WriteOp write;
    std::shared_ptr<ReadSink> read_sink;
    std::shared_ptr<WriteSink> write_sink;
    Deadline deadline;
  };
  struct Planned {
    Fault fault;
    int error;
    std::uint32_t times;
  };

  void lane();
  void submit(std::deque<Op>& queue, Op op);
  Planned plan_locked(const Op& op);
  void serve(const Op& op, Fault fault, int error);
  [[nodiscard]] std::uint64_t checksum(const BlockId& id, const std::byte* shard,
                                       std::uint64_t packed) const noexcept;
  static void answer(const Op& op, Outcome outcome) noexcept;

  const Geometry geometry_;
  const std::shared_ptr<FakeMedium> medium_;
  mutable std::mutex mu_;
  std::condition_variable cv_;
  FakeOptions options_;
  std::deque<Op> reads_;
  std::deque<Op> writes_;
  std::vector<Op> hung_;
  std::unordered_map<BlockId, Planned, BlockIdHash> read_faults_;
  std::unordered_map<BlockId, Planned, BlockIdHash> write_faults_;
  Planned every_{Fault::kNone, 0, 0};
  std::uint64_t steps_ = 0;
  std::uint64_t read_count_ = 0;
  std::uint64_t write_count_ = 0;
  std::uint64_t lookup_count_ = 0;
  std::uint64_t touched_ = 0;
  std::uint64_t read_bytes_ = 0;
  std::uint64_t written_bytes_ = 0;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace ucm
