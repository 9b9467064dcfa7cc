// Doubly linked list through members of its elements: queues that allocate nothing.
#pragma once

#include <cstddef>

namespace ucm {

template <class T>
struct Link {
  T* prev = nullptr;
  T* next = nullptr;
  bool linked = false;
};

/// Not thread-safe. An element is in at most one list per Link member.
template <class T, Link<T> T::*L>
class List {
 public:
  [[nodiscard]] bool empty() const noexcept { return head_ == nullptr; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] T* front() const noexcept { return head_; }
  [[nodiscard]] static T* after(const T* t) noexcept { return (t->*L).next; }
  [[nodiscard]] static bool linked(const T* t) noexcept { return (t->*L).linked; }

  void push_back(T* t) noexcept {
    t->*L = {tail_, nullptr, true};
    (tail_ != nullptr ? (tail_->*L).next : head_) = t;
    tail_ = t;
    ++size_;
  }
  void push_front(T* t) noexcept {
    t->*L = {nullptr, head_, true};
    (head_ != nullptr ? (head_->*L).prev : tail_) = t;
    head_ = t;
    ++size_;
  }
  void remove(T* t) noexcept {
    const Link<T> link = t->*L;
    (link.prev != nullptr ? (link.prev->*L).next : head_) = link.next;
    (link.next != nullptr ? (link.next->*L).prev : tail_) = link.prev;
    t->*L = {};
    --size_;
  }
  T* pop_front() noexcept {
    T* const t = head_;
    if (t != nullptr) remove(t);
    return t;
  }

 private:
  T* head_ = nullptr;
  T* tail_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ucm
