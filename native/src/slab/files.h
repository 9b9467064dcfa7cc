// The slab files of one namespace below its roots: made at start, opened when needed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ucm::slab {

/// Throws PosixSetupError when the namespace directory has objects of the layout `file`.
void refuse_file_layout(const std::string& ns_path);

/// Thread-safe once prepared. Descriptors stay open until the end.
class Files {
 public:
  /// `ns_paths`: the namespace directory of each root, with a slash at its end.
  Files(std::vector<std::string> ns_paths, std::vector<std::uint32_t> counts,
        std::uint64_t slab_bytes);
  ~Files();
  Files(const Files&) = delete;
  Files& operator=(const Files&) = delete;

  /// Makes and preallocates what is missing and removes what is too much. What it has made is removed
  /// again when it fails. Throws PosixSetupError with needed and available space.
  void prepare();

  /// Descriptor of a file, opened with O_DIRECT or without; a negative errno when it cannot be opened.
  [[nodiscard]] int fd(std::uint32_t root, std::uint32_t number, bool direct) noexcept;
  /// 0 while the open file is still the one at its path; else ENOENT. Asks the file system.
  [[nodiscard]] int still_there(std::uint32_t root, std::uint32_t number) noexcept;

  [[nodiscard]] std::string path(std::uint32_t root, std::uint32_t number) const;
  [[nodiscard]] std::uint64_t slab_bytes() const noexcept { return slab_bytes_; }
  [[nodiscard]] std::uint32_t count(std::uint32_t root) const noexcept { return counts_[root]; }

 private:
  [[nodiscard]] std::atomic<int>& at(std::uint32_t root, std::uint32_t number,
                                     bool direct) const noexcept {
    return fds_[2 * (first_[root] + number) + (direct ? 1 : 0)];
  }

  const std::vector<std::string> ns_paths_;
  const std::vector<std::uint32_t> counts_;
  std::vector<std::uint32_t> first_;
  const std::uint64_t slab_bytes_;
  std::size_t total_ = 0;
  std::unique_ptr<std::atomic<int>[]> fds_;  // -1: not open
};

}  // namespace ucm::slab
