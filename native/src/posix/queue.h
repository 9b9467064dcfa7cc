// Bounded FIFO lanes between callers and the I/O threads of one root and direction.
#pragma once

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "posix/engine.h"
#include "ucm/stage.h"

namespace ucm::posix {

/// Growing ring buffer: never allocates again once it has seen its largest backlog.
template <class T>
class Ring {
 public:
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  void push(T&& value) {
    if (size_ == slots_.size()) grow();
    slots_[(head_ + size_) & (slots_.size() - 1)] = std::move(value);
    ++size_;
  }
  T& front() noexcept { return slots_[head_]; }
  T pop() noexcept {
    T out = std::move(slots_[head_]);
    slots_[head_] = T{};
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
    return out;
  }

 private:
  void grow() {
    std::vector<T> wider(slots_.empty() ? 64 : slots_.size() * 2);
    for (std::size_t i = 0; i < size_; ++i) {
      wider[i] = std::move(slots_[(head_ + i) & (slots_.size() - 1)]);
    }
    slots_ = std::move(wider);
    head_ = 0;
  }

  std::vector<T> slots_;
  std::size_t head_ = 0;
  std::size_t size_ = 0;
};

/// Two lanes: urgent ones go first. Item has a `deadline`. Thread-safe.
template <class Item>
class IoQueue {
 public:
  explicit IoQueue(std::size_t limit) : limit_(limit) {}

  /// False when full or closed: the caller answers for the item (left untouched).
  bool push(Item& item, bool urgent) noexcept {
    try {
      std::scoped_lock lock(mutex_);
      if (closed_ || lanes_[0].size() + lanes_[1].size() >= limit_) return false;
      lanes_[urgent ? 0 : 1].push(std::move(item));
      size_.store(lanes_[0].size() + lanes_[1].size());
      return true;
    } catch (...) {  // no memory for a longer queue
      return false;
    }
  }

  /// Wakes up to `n` sleeping threads; call after pushing a batch.
  void notify(std::size_t n) noexcept {
    std::scoped_lock lock(mutex_);
    for (const auto& waker : wakers_) {
      if (n == 0) return;
      if (waker->wake_if_armed()) --n;
    }
  }
  void notify_all() noexcept {
    std::scoped_lock lock(mutex_);
    for (const auto& waker : wakers_) waker->wake();
  }

  /// `urgent_only`: the caller has its fill of background work.
  bool pop(Item& out, bool urgent_only) noexcept {
    if (size_.load() == 0) return false;
    std::scoped_lock lock(mutex_);
    auto& lane = !lanes_[0].empty() || urgent_only ? lanes_[0] : lanes_[1];
    if (lane.empty()) return false;
    out = lane.pop();
    size_.store(lanes_[0].size() + lanes_[1].size());
    return true;
  }

  /// Takes one item whose deadline has passed from the front of a lane (lanes are FIFO and deadlines
  /// of one caller grow); also any item once `everything` is asked for.
  bool pop_expired(Item& out, Deadline now, bool everything) noexcept {
    if (size_.load() == 0) return false;
    std::scoped_lock lock(mutex_);
    for (auto& lane : lanes_) {
      if (lane.empty() || (!everything && lane.front().deadline > now)) continue;
      out = lane.pop();
      size_.store(lanes_[0].size() + lanes_[1].size());
      return true;
    }
    return false;
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_.load(); }
  void close() noexcept {
    std::scoped_lock lock(mutex_);
    closed_ = true;
  }
  void add_waker(std::shared_ptr<Waker> waker) {
    std::scoped_lock lock(mutex_);
    wakers_.push_back(std::move(waker));
  }
  void remove_waker(const std::shared_ptr<Waker>& waker) noexcept {
    std::scoped_lock lock(mutex_);
    std::erase(wakers_, waker);
  }

 private:
  const std::size_t limit_;
  mutable std::mutex mutex_;
  Ring<Item> lanes_[2];
  std::vector<std::shared_ptr<Waker>> wakers_;
  std::atomic<std::size_t> size_{0};
  bool closed_ = false;
};

}  // namespace ucm::posix
