// A store over a Fake stage, and engine memory whose content follows from id and shard.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "ucm/device.h"
#include "ucm/empty_stage.h"
#include "ucm/fake_stage.h"
#include "ucm/staging_tier.h"
#include "ucm/store.h"

namespace ucm::test {

using namespace std::chrono_literals;

inline constexpr std::uint32_t kShards = 4;
inline constexpr std::uint32_t kRuns = 2;
inline constexpr std::size_t kRunBytes = 640;
inline constexpr std::byte kUntouched{0xEE};

inline Geometry small_geometry() {
  return {kShards, kRuns * kRunBytes, kRuns, {{kRunBytes, 1, 0}}, ""};
}

inline BlockId id_of(std::uint32_t n) {
  BlockId id;
  id.bytes[0] = 1;
  std::memcpy(id.bytes.data() + 4, &n, sizeof n);
  return id;
}

/// Engine memory for rows (id, shard): filled by key, or untouched.
class Rowset {
 public:
  void add(std::uint32_t object, std::uint32_t shard) {
    ids.push_back(id_of(object));
    shards.push_back(shard);
    objects_.push_back(object);
  }
  void add_object(std::uint32_t object) {
    for (std::uint32_t s = 0; s < kShards; ++s) add(object, s);
  }
  Rowset& filled() {
    memory.resize(size() * kRuns * kRunBytes);
    for (std::size_t row = 0; row < size(); ++row) {
      for (std::size_t i = 0; i < kRuns * kRunBytes; ++i) memory[at(row) + i] = expected(row, i);
    }
    return point();
  }
  Rowset& blank() {
    memory.assign(size() * kRuns * kRunBytes, kUntouched);
    return point();
  }
  [[nodiscard]] std::size_t size() const { return ids.size(); }
  [[nodiscard]] Rows rows() const { return {ids, shards, addresses}; }
  [[nodiscard]] bool right(std::size_t row) const {
    for (std::size_t i = 0; i < kRuns * kRunBytes; ++i) {
      if (memory[at(row) + i] != expected(row, i)) return false;
    }
    return true;
  }
  [[nodiscard]] bool untouched(std::size_t row) const {
    for (std::size_t i = 0; i < kRuns * kRunBytes; ++i) {
      if (memory[at(row) + i] != kUntouched) return false;
    }
    return true;
  }
  std::vector<BlockId> ids;
  std::vector<std::uint32_t> shards;
  std::vector<std::uint64_t> addresses;
  std::vector<std::byte> memory;

 private:
  Rowset& point() {
    addresses.clear();
    for (std::size_t row = 0; row < size(); ++row) {
      for (std::uint32_t r = 0; r < kRuns; ++r) {
        addresses.push_back(
            reinterpret_cast<std::uint64_t>(memory.data() + at(row) + r * kRunBytes));
      }
    }
    return *this;
  }
  [[nodiscard]] std::size_t at(std::size_t row) const { return row * kRuns * kRunBytes; }
  [[nodiscard]] std::byte expected(std::size_t row, std::size_t i) const {
    return static_cast<std::byte>(objects_[row] * 31 + shards[row] * 7 + i * 3 + i / 251);
  }
  std::vector<std::uint32_t> objects_;
};

struct StoreSetup {
  StoreOptions store{};
  FakeOptions fake{};
  std::uint32_t load_buffers = 8;
  std::uint32_t shared_buffers = 24;
  std::shared_ptr<Device> device = host_device();
};

class StoreTest : public ::testing::Test {
 protected:
  void open(StoreSetup setup = {}) {
    store.reset();
    fake = std::make_shared<FakeStage>(small_geometry(), medium, setup.fake);
    tier =
        std::make_shared<StagingTier>(small_geometry(), setup.load_buffers, setup.shared_buffers);
    store = std::make_unique<Store>(fake, tier, setup.device, setup.store);
  }
  static std::vector<Status> wait(Task& task, std::chrono::milliseconds timeout = 20s) {
    if (!task.wait_until(Clock::now() + timeout)) task.give_up(Status::kTimeout);
    return statuses(task);
  }
  static std::vector<Status> wait_durable(Task& task, std::chrono::milliseconds timeout = 20s) {
    if (!task.wait_durable_until(Clock::now() + timeout)) task.give_up_durable(Status::kTimeout);
    std::vector<Status> out;
    for (std::size_t i = 0; i < task.size(); ++i) out.push_back(task.durable_outcome(i).status);
    return out;
  }
  static std::vector<Status> statuses(Task& task) {
    std::vector<Status> out;
    for (std::size_t i = 0; i < task.size(); ++i) out.push_back(task.outcome(i).status);
    return out;
  }
  static std::vector<Status> all(std::size_t n, Status status) {
    return std::vector<Status>(n, status);
  }
  /// Dump whole objects [begin, end) and wait until they are stored.
  void stored(std::uint32_t begin, std::uint32_t end) {
    Rowset source;
    for (std::uint32_t o = begin; o < end; ++o) source.add_object(o);
    source.filled();
    const auto task = store->dump(source.rows(), 0, CommitMode::kAuto);
    ASSERT_EQ(wait_durable(*task), all(source.size(), Status::kOk));
  }
  bool present(std::uint32_t object) {
    std::uint8_t out = 0;
    const BlockId id = id_of(object);
    store->lookup({&id, 1}, {&out, 1});
    return out != 0;
  }
  std::uint64_t stat(const std::string& name) { return store->stats().at(name); }
  /// Poll until `done()`; false after 20 s.
  template <class F>
  static bool eventually(F&& done) {
    const auto end = Clock::now() + 20s;
    while (!done()) {
      if (Clock::now() > end) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }

  std::shared_ptr<FakeMedium> medium = std::make_shared<FakeMedium>();
  std::shared_ptr<FakeStage> fake;
  std::shared_ptr<StagingTier> tier;
  std::unique_ptr<Store> store;
};

/// Host memory whose copies can be held: a copier stays inside a copy until it is let go.
class GateDevice final : public Device {
 public:
  std::string name() const override { return "gate"; }
  void copy_in(std::byte* dst, const std::uint64_t* addresses, std::size_t runs,
               const RunShape& run) noexcept override {
    pass();
    host_->copy_in(dst, addresses, runs, run);
  }
  void copy_out(const std::byte* src, const std::uint64_t* addresses, std::size_t runs,
                const RunShape& run) noexcept override {
    pass();
    host_->copy_out(src, addresses, runs, run);
  }
  Outcome flush() noexcept override { return host_->flush(); }
  std::shared_ptr<Event> event(std::uint64_t handle) override { return host_->event(handle); }

  void shut() {
    const std::lock_guard lock(mu_);
    shut_ = true;
  }
  void let_go() {
    const std::lock_guard lock(mu_);
    shut_ = false;
    cv_.notify_all();
  }
  bool wait_inside() {
    std::unique_lock lock(mu_);
    return cv_.wait_for(lock, 20s, [&] { return inside_ > 0; });
  }

 private:
  void pass() {
    std::unique_lock lock(mu_);
    ++inside_;
    cv_.notify_all();
    cv_.wait(lock, [&] { return !shut_; });
    --inside_;
  }
  const std::shared_ptr<Device> host_ = host_device();
  std::mutex mu_;
  std::condition_variable cv_;
  bool shut_ = false;
  int inside_ = 0;
};

}  // namespace ucm::test
