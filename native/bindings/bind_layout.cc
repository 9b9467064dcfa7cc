// Python face of ucm/layout.h: descriptors and conversions between them, run without the GIL.
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <functional>
#include <string>

#include "module.h"
#include "ucm/layout.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ucm::bindings {
namespace {

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

Layout parse(const std::string& text) {
  std::string error;
  auto layout = Layout::parse(text, error);
  if (!layout) throw nb::value_error(error.c_str());
  return *std::move(layout);
}

std::uint64_t total(const Layout& layout, const std::string& dim, std::size_t kv) {
  for (std::size_t i = 0; i < kDimNames.size(); ++i) {
    if (dim == kDimNames[i] && kv < 2) return layout.total(static_cast<Dim>(i), kv);
  }
  throw nb::value_error(("unknown dimension '" + dim + "' or kv not 0 or 1").c_str());
}

Conversion plan(const Layout& source, const Layout& target, std::uint64_t source_align,
                std::uint64_t target_align) {
  if (source_align == 0 || target_align == 0) throw nb::value_error("an alignment is 0");
  std::string why_not;
  auto made = Conversion::plan(source, target, source_align, target_align, why_not);
  if (!made) throw nb::value_error(why_not.c_str());
  return *std::move(made);
}

void run(const Conversion& c, const Bytes& source, const OutBytes& target, std::uint64_t begin,
         std::uint64_t end) {
  if (source.shape(0) < c.source_bytes())
    throw nb::value_error("source is smaller than the stored object");
  if (target.shape(0) < c.target_bytes())
    throw nb::value_error("target is smaller than the object wanted");
  if (begin > end || end > c.target_shards())
    throw nb::value_error("shards [begin, end) lie outside the target");
  const auto* src = reinterpret_cast<const std::byte*>(source.data());
  auto* dst = reinterpret_cast<std::byte*>(target.data());
  const nb::gil_scoped_release release;
  c.run(dst, src, begin, end);
}

}  // namespace

void bind_layout(nb::module_& m) {
  nb::class_<Layout>(m, "LayoutDescriptor", "The order of an object's bytes; immutable.")
      .def_static("parse", &parse, "text"_a)
      .def("__str__", &Layout::text)
      .def("__repr__",
           [](const Layout& layout) { return "LayoutDescriptor('" + layout.text() + "')"; })
      .def("__eq__",
           [](const Layout& a, const nb::object& b) {
             return nb::isinstance<Layout>(b) && a == nb::cast<const Layout&>(b);
           })
      .def("__hash__",
           [](const Layout& layout) {
             return static_cast<std::int64_t>(std::hash<std::string>{}(layout.text()) >> 1);
           })
      .def_prop_ro("dtype", &Layout::dtype)
      .def_prop_ro("opaque", &Layout::opaque)
      .def_prop_ro("item_bytes", &Layout::item_bytes)
      .def_prop_ro("total_bytes", &Layout::total_bytes)
      .def_prop_ro("shard_count", &Layout::shard_count)
      .def_prop_ro("shard_bytes", &Layout::shard_bytes)
      .def("total", &total, "dim"_a, "kv"_a = 0);
  nb::class_<Conversion>(m, "Conversion", "Copies from one layout to another.")
      .def_static("plan", &plan, "source"_a, "target"_a, "source_align"_a, "target_align"_a)
      .def("run", &run, "source"_a.noconvert(), "target"_a.noconvert(), "begin"_a, "end"_a)
      .def_prop_ro("source_bytes", &Conversion::source_bytes)
      .def_prop_ro("target_bytes", &Conversion::target_bytes)
      .def_prop_ro("target_shards", &Conversion::target_shards)
      .def_prop_ro("straight", &Conversion::straight);
}

}  // namespace ucm::bindings
