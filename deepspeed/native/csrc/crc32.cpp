// The checksum of zip archives and of zlib (CRC-32, polynomial 0xEDB88320), by carry-less multiplication where the CPU
// has it: 64 bytes are folded at a time. Source: Gopal et al., "Fast CRC Computation for Generic Polynomials Using
// PCLMULQDQ Instruction", Intel 2009; constants for the reflected polynomial as printed there.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define DS_X86 1
#endif
#if defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#define DS_ARM 1
#endif

namespace {

// Eight tables of 256: a byte, and the same byte with 1 to 7 zero bytes behind it.
struct Tables {
  uint32_t row[8][256];
  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = value & 1 ? (value >> 1) ^ 0xEDB88320u : value >> 1;
      row[0][byte] = value;
    }
    for (int zeros = 1; zeros < 8; ++zeros)
      for (int byte = 0; byte < 256; ++byte)
        row[zeros][byte] = (row[zeros - 1][byte] >> 8) ^ row[0][row[zeros - 1][byte] & 255];
  }
};

const Tables tables;

uint32_t by_table(uint32_t crc, const unsigned char *data, size_t nbytes) {
  const auto &t = tables.row;
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint32_t low, high;
    std::memcpy(&low, data, 4);
    std::memcpy(&high, data + 4, 4);
    low ^= crc;
    crc = t[7][low & 255] ^ t[6][low >> 8 & 255] ^ t[5][low >> 16 & 255] ^ t[4][low >> 24] ^ t[3][high & 255] ^
          t[2][high >> 8 & 255] ^ t[1][high >> 16 & 255] ^ t[0][high >> 24];
  }
  for (; nbytes; ++data, --nbytes) crc = (crc >> 8) ^ t[0][(crc ^ *data) & 255];
  return crc;
}

#ifdef DS_X86

#define DS_FOLDS __attribute__((target("pclmul,sse4.1")))

// The compilers' own names of single instructions: <immintrin.h> would take a second to read.
typedef long long Pair __attribute__((vector_size(16)));  // the lower 64 bits first
typedef int Quad __attribute__((vector_size(16)));

// Which halves of two pairs PCLMULQDQ multiplies: the first's in bit 0, the second's in bit 4.
enum { LOW_LOW = 0x00, LOW_HIGH = 0x10, HIGH_HIGH = 0x11 };

#define DS_TIMES(a, b, halves) (Pair) __builtin_ia32_pclmulqdq128(a, b, halves)

DS_FOLDS Pair load(const unsigned char *data) {
  Pair value;
  std::memcpy(&value, data, sizeof value);  // any alignment; one instruction
  return value;
}

// `value` times the two powers of x in `by`, plus what follows.
DS_FOLDS Pair fold(Pair value, Pair by, Pair next) {
  return DS_TIMES(value, by, LOW_LOW) ^ DS_TIMES(value, by, HIGH_HIGH) ^ next;
}

// nbytes: a multiple of 16, at least 64.
DS_FOLDS uint32_t by_folding(uint32_t crc, const unsigned char *data, size_t nbytes) {
  const Pair by512 = {0x154442bd4, 0x1c6e41596}, by128 = {0x1751997d0, 0x0ccaa009e};
  Pair lane[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) lane[i] = load(data + 16 * i);
  lane[0] ^= Pair{static_cast<long long>(crc), 0};
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64)
#pragma GCC unroll 4  // lanes in registers
    for (int i = 0; i < 4; ++i) lane[i] = fold(lane[i], by512, load(data + 16 * i));
  Pair rest = lane[0];
#pragma GCC unroll 4
  for (int i = 1; i < 4; ++i) rest = fold(rest, by128, lane[i]);
  for (; nbytes >= 16; data += 16, nbytes -= 16) rest = fold(rest, by128, load(data));
  // 128 bits to 64, then the remainder by Barrett's method.
  const Pair low32 = {0xffffffffll, 0xffffffffll};
  rest = Pair{rest[1], 0} ^ DS_TIMES(rest, by128, LOW_HIGH);
  const Quad words = (Quad)rest;
  const Quad upper = {words[1], words[2], words[3], 0};
  rest = DS_TIMES(rest & low32, (Pair{0x163cd6124, 0}), LOW_LOW) ^ (Pair)upper;
  const Pair barrett = {0x1db710641, 0x1f7011641};
  Pair quotient = DS_TIMES(rest & low32, barrett, LOW_HIGH);
  quotient = DS_TIMES(quotient & low32, barrett, LOW_LOW);
  return static_cast<uint32_t>(((Quad)(rest ^ quotient))[1]);
}

bool folds() {
  static const bool found = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return found;
}

#endif

}  // namespace

// The checksum of what had the checksum `value`, followed by `data`.
extern "C" __attribute__((visibility("default"))) uint32_t ds_crc32(uint32_t value, const unsigned char *data,
                                                                    size_t nbytes) {
  uint32_t crc = ~value;
#ifdef DS_X86
  if (nbytes >= 64 && folds()) {
    size_t whole = nbytes / 16 * 16;
    crc = by_folding(crc, data, whole);
    data += whole;
    nbytes -= whole;
  }
#endif
#ifdef DS_ARM
  for (; nbytes >= 8; data += 8, nbytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32d(crc, word);
  }
#endif
  return ~by_table(crc, data, nbytes);
}
