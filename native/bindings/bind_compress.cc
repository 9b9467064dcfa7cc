// Python face of the Compress stage (ucm/compress.h).
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "handles.h"
#include "module.h"
#include "ucm/compress.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {

void bind_compress(nb::module_& m) {
  nb::exception<CompressSetupError>(m, "CompressSetupError", PyExc_RuntimeError);
  m.def(
      "compress_stage",
      [](const StageHandle& below, const std::string& codec, int level, std::uint32_t element_bytes,
         std::uint32_t threads, std::uint64_t buffer_bytes) {
        CompressOptions o;
        if (codec == "zstd") {
          o.codec = CodecKind::kZstd;
        } else if (codec == "lz4") {
          o.codec = CodecKind::kLz4;
        } else if (codec == "none") {
          o.codec = CodecKind::kNone;
        } else {
          throw CompressSetupError("Compress: unknown codec '" + codec +
                                   "'; known: zstd, lz4, none");
        }
        o.level = level;
        o.element_bytes = element_bytes;
        o.threads = threads;
        o.buffer_bytes = buffer_bytes;
        return StageHandle{make_compress_stage(below.stage, o)};
      },
      "below"_a, nb::kw_only(), "codec"_a, "level"_a = 1, "element_bytes"_a = 0, "threads"_a = 0,
      "buffer_bytes"_a = std::uint64_t{256} << 20,
      "A stage that packs shards above another one (ucm/compress.h), which it shuts down.");
}

}  // namespace ucm::bindings
