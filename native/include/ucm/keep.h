// Objects that must outlive everything: their destructors cannot run safely any more.
#pragma once

#include <atomic>
#include <memory>

namespace ucm {

/// Keep `p` until the process ends, on purpose: I/O that never came back may still use it, or its
/// destructor would wait for threads that do not exist in this process (after fork). Lock-free, so
/// that it works in a child whose parent held any lock. Reachable, so that leak checkers stay quiet.
inline void keep_forever(std::shared_ptr<const void> p) {
  struct Node {
    std::shared_ptr<const void> kept;
    Node* next;
  };
  static std::atomic<Node*> head{nullptr};
  Node* const node = new Node{std::move(p), head.load(std::memory_order_relaxed)};
  while (!head.compare_exchange_weak(node->next, node, std::memory_order_release,
                                     std::memory_order_relaxed)) {
  }
}

}  // namespace ucm
