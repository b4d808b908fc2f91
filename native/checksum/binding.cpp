#include <ds/checksum.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

// The bytes of anything with the buffer protocol, held while a call runs without the interpreter.
class Bytes {
 public:
  Bytes(const py::object &memory, bool writable) {
    if (PyObject_GetBuffer(memory.ptr(), &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE))
      throw py::error_already_set();
  }
  Bytes(const Bytes &) = delete;
  Bytes &operator=(const Bytes &) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }
  unsigned char *data() const { return static_cast<unsigned char *>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

ds::CrcLevel checked(int level) {
  const int best = static_cast<int>(ds::crc32_best());
  if (level > best) throw py::value_error("this machine does not have that level");
  return static_cast<ds::CrcLevel>(level < 0 ? best : level);
}

std::uint32_t crc32(const py::object &data, std::uint32_t value, int level) {
  const Bytes bytes(data, false);
  const ds::CrcLevel chosen = checked(level);
  py::gil_scoped_release nogil;
  return ds::crc32(value, bytes.data(), bytes.size(), chosen);
}

std::uint32_t copy_crc32(const py::object &target, const py::object &source, std::uint32_t value, int level) {
  const Bytes to(target, true), from(source, false);
  const ds::CrcLevel chosen = checked(level);
  if (to.size() != from.size()) throw py::value_error("target and source differ in length");
  py::gil_scoped_release nogil;
  return ds::copy_crc32(value, to.data(), from.data(), to.size(), chosen);
}

int populate(const py::object &data) {
  const Bytes bytes(data, false);
  py::gil_scoped_release nogil;
  return ds::populate(bytes.data(), bytes.size());
}

bool resident(const py::object &data) {
  const Bytes bytes(data, false);
  return ds::resident(bytes.data(), bytes.size());
}

}  // namespace

void bind_checksum(py::module_ &m) {
  m.def("crc32_best", [] { return static_cast<int>(ds::crc32_best()); });
  m.def("crc32", crc32, py::arg("data"), py::arg("value"), py::arg("level"));
  m.def("copy_crc32", copy_crc32, py::arg("target"), py::arg("source"), py::arg("value"), py::arg("level"));
  m.def("populate", populate, py::arg("data"));
  m.def("resident", resident, py::arg("data"));
}
