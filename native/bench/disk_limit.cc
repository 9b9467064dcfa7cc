// The disk alone: O_DIRECT at a given I/O size and depth, with and without a file per object, and
// the rate at which the file system answers stat.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "meter.h"
#if UCM_HAVE_URING
#include "ring.h"
#endif

namespace ucm::bench {
namespace {

std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

}  // namespace

Report stat_files(const Args& args) {
  const auto paths = lines_of(args.text("list"));
  std::uint64_t found = 0;
  const Meter meter;
  for (const auto& path : paths) {
    struct stat info {};
    found += stat(path.c_str(), &info) == 0 ? 1 : 0;
  }
  const Cost cost = meter.stop();
  if (found != paths.size() * args.number("exist")) {
    throw std::runtime_error(std::to_string(found) + " of " + std::to_string(paths.size()) +
                             " paths exist");
  }
  return {cost, paths.size(), 0};
}

#if UCM_HAVE_URING

namespace {

int open_direct(const std::string& path, int flags) {
  const int fd = open(path.c_str(), flags | O_DIRECT | O_CLOEXEC, 0600);
  if (fd < 0) fail("open O_DIRECT " + path, errno);
  return fd;
}

}  // namespace

namespace {

/// A preallocated file of `count` blocks that was written once.
void ensure_file(Ring& ring, const std::string& path, std::size_t io_bytes, std::size_t count) {
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 &&
      static_cast<std::size_t>(info.st_size) == count * io_bytes) {
    return;
  }
  const int fd = open_direct(path, O_RDWR | O_CREAT | O_TRUNC);
  if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(count * io_bytes)); error) {
    fail("posix_fallocate " + path, error);
  }
  ring.run(
      count, true,
      [&](std::size_t i) {
        return std::pair{fd, i * io_bytes};
      },
      [](std::size_t) {});
  fsync(fd);
  close(fd);
}

}  // namespace

/// One preallocated file written over in the order of its blocks: what slots cost at least.
Report write_one_file(const Args& args) {
  const std::string path = args.text("path");
  const std::size_t io_bytes = args.number("io_bytes");
  const std::size_t count = args.number("count");
  Ring ring(args.number("depth"), io_bytes);
  ensure_file(ring, path, io_bytes, count);
  const int fd = open_direct(path, O_WRONLY);
  const Meter meter;
  ring.run(
      count, true,
      [&](std::size_t i) {
        return std::pair{fd, i * io_bytes};
      },
      [](std::size_t) {});
  const Cost cost = meter.stop();
  close(fd);
  return {cost, count, count * io_bytes};
}

/// One preallocated file read in random order: no open, no fstat, no close per object.
Report read_one_file(const Args& args) {
  const std::string path = args.text("path");
  const std::size_t io_bytes = args.number("io_bytes");
  const std::size_t count = args.number("count");
  Ring ring(args.number("depth"), io_bytes);
  ensure_file(ring, path, io_bytes, count);
  std::vector<std::uint64_t> order(count);
  for (std::size_t i = 0; i < count; ++i) order[i] = i;
  std::uint64_t state = 88172645463325252u;  // xorshift64: the same order in every run
  for (std::size_t i = count - 1; i > 0; --i) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    std::swap(order[i], order[state % (i + 1)]);
  }
  const int fd = open_direct(path, O_RDONLY);
  const Meter meter;
  ring.run(
      count, false,
      [&](std::size_t i) {
        return std::pair{fd, order[i] * io_bytes};
      },
      [](std::size_t) {});
  const Cost cost = meter.stop();
  close(fd);
  return {cost, count, count * io_bytes};
}

/// open + fstat + read + close of each listed file.
Report read_files(const Args& args) {
  const auto paths = lines_of(args.text("list"));
  const std::size_t io_bytes = args.number("io_bytes");
  Ring ring(args.number("depth"), io_bytes);
  std::vector<int> fds(paths.size(), -1);
  const Meter meter;
  ring.run(
      paths.size(), false,
      [&](std::size_t i) {
        struct stat info {};
        fds[i] = open_direct(paths[i], O_RDONLY);
        if (fstat(fds[i], &info) != 0) fail("fstat " + paths[i], errno);
        return std::pair{fds[i], std::size_t{0}};
      },
      [&](std::size_t i) { close(fds[i]); });
  return {meter.stop(), paths.size(), paths.size() * io_bytes};
}

/// create + write + close + rename of `count` files below `dir`; unless kept, they are removed after
/// the clock stopped.
Report write_files(const Args& args) {
  const std::string dir = args.text("dir");
  const std::size_t io_bytes = args.number("io_bytes");
  const std::size_t count = args.number("count");
  const bool preallocate = args.number("preallocate") != 0;
  Ring ring(args.number("depth"), io_bytes);
  std::vector<std::pair<std::string, std::string>> names;
  for (std::size_t i = 0; i < count; ++i) {
    const std::string name = dir + "/" + std::to_string(i);
    names.emplace_back(name + ".tmp", name);
  }
  std::vector<int> fds(count, -1);
  const Meter meter;
  ring.run(
      count, true,
      [&](std::size_t i) {
        fds[i] = open_direct(names[i].first, O_WRONLY | O_CREAT | O_EXCL);
        if (preallocate && fallocate(fds[i], 0, 0, static_cast<off_t>(io_bytes)) != 0) {
          fail("fallocate " + names[i].first, errno);
        }
        return std::pair{fds[i], std::size_t{0}};
      },
      [&](std::size_t i) {
        close(fds[i]);
        if (rename(names[i].first.c_str(), names[i].second.c_str()) != 0) fail("rename", errno);
      });
  const Cost cost = meter.stop();
  if (args.number("keep") == 0) {
    for (const auto& [temporary, final] : names) unlink(final.c_str());
  }
  return {cost, count, count * io_bytes};
}

#else

namespace {
[[noreturn]] Report no_ring() { throw std::runtime_error("built without liburing"); }
}  // namespace
Report read_one_file(const Args&) { no_ring(); }
Report write_one_file(const Args&) { no_ring(); }
Report read_files(const Args&) { no_ring(); }
Report write_files(const Args&) { no_ring(); }

#endif

}  // namespace ucm::bench
