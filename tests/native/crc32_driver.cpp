// crc32.cpp against the definition, bit by bit, on buffers of the very size, for sanitizers.
#include "crc32.cpp"

#include <cstdio>
#include <memory>

static uint32_t by_definition(uint32_t value, const unsigned char *data, size_t nbytes) {
  uint32_t crc = ~value;
  for (size_t i = 0; i < nbytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0u);
  }
  return ~crc;
}

int main() {
  int failures = 0;
  uint32_t before = 0;
  for (size_t nbytes = 0; nbytes < 600; ++nbytes)
    for (size_t off = 0; off < 3; ++off) {
      std::unique_ptr<unsigned char[]> memory(new unsigned char[nbytes + off]);
      for (size_t i = 0; i < nbytes + off; ++i) memory[i] = static_cast<unsigned char>(i * 131 + nbytes);
      const uint32_t found = ds_crc32(before, memory.get() + off, nbytes);
      if (found != by_definition(before, memory.get() + off, nbytes)) ++failures;
      before = found;
    }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
