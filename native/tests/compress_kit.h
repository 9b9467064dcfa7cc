// Shared by the tests of the Compress stage: contents that compress in part, in full or not at all.
#pragma once

#include <bit>
#include <cstring>
#include <memory>
#include <random>

#include "posix_kit.h"
#include "ucm/compress.h"

namespace ucm::compress_test {

enum class Content : std::uint8_t { kNoise, kZeros, kBf16 };

/// `bytes` that follow from the seed. kBf16: numbers around zero, as KV are.
inline void fill(std::byte* to, std::size_t bytes, Content content, std::uint64_t seed) {
  std::mt19937_64 rng(seed * 77 + 5);
  if (content == Content::kZeros) return void(std::memset(to, static_cast<int>(seed % 7), bytes));
  if (content == Content::kNoise) {
    for (std::size_t i = 0; i < bytes; ++i) to[i] = static_cast<std::byte>(rng() >> 24);
    return;
  }
  std::normal_distribution<float> normal(0.0F, 0.3F);
  for (std::size_t i = 0; i + 1 < bytes; i += 2) {
    const auto bits = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(normal(rng)) >> 16);
    std::memcpy(to + i, &bits, 2);
  }
  if (bytes % 2 != 0) to[bytes - 1] = std::byte{0x55};
}

/// An object whose shard s has content s mod 3 (or the one content given).
class Object {
 public:
  Object(const Geometry& g, std::uint64_t seed, int content = -1)
      : g_(g), data_(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, g.object_bytes()))) {
    std::memset(data_.get(), 0, g.object_bytes());
    for (std::uint32_t s = 0; s < g.shard_count; ++s) {
      fill(data_.get() + g.shard_offset(s), g.shard_bytes,
           static_cast<Content>(content < 0 ? s % 3 : static_cast<unsigned>(content)),
           seed * 1000 + s);
    }
  }
  [[nodiscard]] std::byte* data() const { return data_.get(); }
  [[nodiscard]] bool equals(const Object& other, std::uint32_t begin, std::uint32_t end) const {
    for (std::uint32_t s = begin; s < end; ++s) {
      const std::size_t at = g_.shard_offset(s);
      if (std::memcmp(data() + at, other.data() + at, g_.shard_bytes) != 0) return false;
    }
    return true;
  }

 private:
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  Geometry g_;
  std::unique_ptr<std::byte, Free> data_;
};

/// Results of reads shard by shard; every shard must be told exactly once.
class Shards : public ReadSink {
 public:
  explicit Shards(std::uint32_t count) : outcomes_(count) {}
  void on_read(std::uint64_t, std::uint32_t begin, std::uint32_t end, Outcome o) noexcept override {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t s = begin; s < end; ++s) {
      if (outcomes_[s].status != Status::kPending) twice_ = true;
      outcomes_[s] = o;
      ++told_;
    }
    done_.notify_all();
  }
  [[nodiscard]] bool wait(std::size_t count,
                          posix_test::milliseconds timeout = posix_test::milliseconds(20'000)) {
    std::unique_lock lock(mutex_);
    return done_.wait_for(lock, timeout, [&] { return told_ >= count; }) && !twice_;
  }
  [[nodiscard]] Outcome at(std::uint32_t s) {
    const std::lock_guard lock(mutex_);
    return outcomes_[s];
  }
  [[nodiscard]] std::size_t told() {
    const std::lock_guard lock(mutex_);
    return told_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  std::vector<Outcome> outcomes_;
  std::size_t told_ = 0;
  bool twice_ = false;
};

inline Outcome write(Stage& stage, const BlockId& id, const Object& from,
                     posix_test::milliseconds timeout = posix_test::milliseconds(20'000)) {
  auto results = std::make_shared<posix_test::Results>(1);
  const WriteOp op{id, from.data(), 0, nullptr};
  stage.write({&op, 1}, results, posix_test::in(timeout));
  EXPECT_TRUE(results->wait());
  return results->at(0);
}

/// Reads [begin, end) into `into`; the outcome of all of them, which must agree.
inline Outcome read(Stage& stage, const BlockId& id, Object& into, std::uint32_t begin,
                    std::uint32_t end) {
  auto shards = std::make_shared<Shards>(stage.geometry().shard_count);
  const ReadOp op{id, into.data(), begin, end, 0, true, nullptr};
  stage.read({&op, 1}, shards, posix_test::in(posix_test::milliseconds(20'000)));
  EXPECT_TRUE(shards->wait(end - begin));
  for (std::uint32_t s = begin; s < end; ++s) {
    EXPECT_EQ(static_cast<int>(shards->at(s).status), static_cast<int>(shards->at(begin).status));
  }
  return shards->at(begin);
}

}  // namespace ucm::compress_test
