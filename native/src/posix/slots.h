// Fixed slots of an I/O thread: everything an operation needs, allocated once.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "ucm/geometry.h"
#include "ucm/keep.h"

namespace ucm::posix {

/// Slot has `std::byte* header`: each gets an aligned buffer of `header_bytes`. Used by one thread.
template <class Slot>
class SlotPool {
 public:
  SlotPool(std::size_t count, std::size_t header_bytes)
      : slots_(new Slot[count]),
        headers_(static_cast<std::byte*>(std::aligned_alloc(kIoAlign, count * header_bytes))),
        count_(count) {
    if (headers_ == nullptr) {
      delete[] slots_;
      throw std::bad_alloc();
    }
    free_.reserve(count);
    for (std::size_t i = count; i-- > 0;) {
      slots_[i].header = headers_ + i * header_bytes;
      free_.push_back(&slots_[i]);
    }
  }
  ~SlotPool() {
    if (leaked_) return;
    delete[] slots_;
    std::free(headers_);
  }
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  [[nodiscard]] Slot* take() noexcept {
    if (free_.empty()) return nullptr;
    Slot* slot = free_.back();
    free_.pop_back();
    return slot;
  }
  void give_back(Slot& slot) noexcept { free_.push_back(&slot); }
  [[nodiscard]] std::size_t used() const noexcept { return count_ - free_.size(); }
  [[nodiscard]] bool any_free() const noexcept { return !free_.empty(); }
  [[nodiscard]] Slot* begin() noexcept { return slots_; }
  [[nodiscard]] Slot* end() noexcept { return slots_ + count_; }
  /// The kernel may still write into the slots: they live for ever.
  void leak() noexcept {
    if (std::exchange(leaked_, true)) return;
    try {  // findable, so that a leak checker tells what is kept on purpose from what is lost
      keep_forever(std::shared_ptr<const void>(slots_, [](const void*) {}));
      keep_forever(std::shared_ptr<const void>(headers_, [](const void*) {}));
    } catch (const std::bad_alloc&) {
    }
  }

 private:
  Slot* slots_;
  std::byte* headers_;
  std::size_t count_;
  std::vector<Slot*> free_;
  bool leaked_ = false;
};

/// First in, first out, of slots that have `Slot* next`. Never allocates.
template <class Slot>
class SlotFifo {
 public:
  [[nodiscard]] bool empty() const noexcept { return head_ == nullptr; }
  void push(Slot& slot) noexcept {
    slot.next = nullptr;
    (tail_ == nullptr ? head_ : tail_->next) = &slot;
    tail_ = &slot;
  }
  /// Null when empty.
  [[nodiscard]] Slot* pop() noexcept {
    Slot* const slot = head_;
    if (slot == nullptr) return nullptr;
    head_ = slot->next;
    if (head_ == nullptr) tail_ = nullptr;
    return slot;
  }
  /// `slot` must be in it.
  void remove(const Slot& slot) noexcept {
    Slot* before = nullptr;
    for (Slot* at = head_; at != &slot; at = at->next) before = at;
    (before == nullptr ? head_ : before->next) = slot.next;
    if (tail_ == &slot) tail_ = before;
  }

 private:
  Slot* head_ = nullptr;
  Slot* tail_ = nullptr;
};

}  // namespace ucm::posix
