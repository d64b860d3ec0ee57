// Block formats and continuous quantization on CPU, equal to dmx.numerics bit for bit; and losses of rows of
// logits, equal to them within float32 rounding.
//
// A tensor comes as `rows` rows of `n` contiguous values; blocks of 32 run along a row and the
// last one of a row may be short. All arithmetic is on magnitudes in float32, the sign bit is put
// back at the end. Rounding to a multiple of a power-of-two step is `(a + c) - c` with
// c = 2^23 * step: the sum lies in [c, 2c), where neighbouring floats are one step apart, and the
// addition rounds to nearest even. Build without -ffast-math and with -ffp-contract=off.

#include <cstdint>
#include <cstring>
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int kBlock = 32;
constexpr int64_t kChunk = 256;  // blocks that one task works through; fixes the order of sums
constexpr uint32_t kMagnitude = 0x7fffffffu, kSign = 0x80000000u, kInf = 0x7f800000u;
constexpr int kMantissaBits = 23, kBias = 127;

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 2^exponent for exponents in [-127, 127]; -127 is a subnormal.
inline float power_of_two(int exponent) {
  return float_of(exponent > -kBias ? uint32_t(exponent + kBias) << kMantissaBits : 1u << 22);
}

// ---- element types: bits of float32 in, storage bits out -----------------------------------

struct Float32 {
  using Storage = uint32_t;
  static constexpr Storage kNan = 0x7fc00000u;
  static void load(const Storage* from, uint32_t* bits) { std::memcpy(bits, from, 4 * kBlock); }
  static void store(const uint32_t* bits, Storage* to) { std::memcpy(to, bits, 4 * kBlock); }
};

struct BFloat16 {
  using Storage = uint16_t;
  static constexpr Storage kNan = 0x7fc0u;
  static void load(const Storage* from, uint32_t* bits) {
    for (int i = 0; i < kBlock; ++i) bits[i] = uint32_t(from[i]) << 16;
  }
  // Values are never NaN here; rounding up past the largest gives Inf, as a cast does.
  static void store(const uint32_t* bits, Storage* to) {
    for (int i = 0; i < kBlock; ++i)
      to[i] = Storage((bits[i] + 0x7fffu + ((bits[i] >> 16) & 1u)) >> 16);
  }
};

struct Float16 {
  using Storage = uint16_t;
  static constexpr Storage kNan = 0x7e00u;
#if defined(__AVX512F__)
  static void load(const Storage* from, uint32_t* bits) {
    for (int i = 0; i < kBlock; i += 16) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
      _mm512_storeu_ps(bits + i, _mm512_cvtph_ps(half));
    }
  }
  static void store(const uint32_t* bits, Storage* to) {
    for (int i = 0; i < kBlock; i += 16) {
      const __m512 wide = _mm512_loadu_ps(bits + i);
      const __m256i half = _mm512_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), half);
    }
  }
#elif defined(__F16C__)
  static void load(const Storage* from, uint32_t* bits) {
    for (int i = 0; i < kBlock; i += 8) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
      _mm256_storeu_ps(reinterpret_cast<float*>(bits + i), _mm256_cvtph_ps(half));
    }
  }
  static void store(const uint32_t* bits, Storage* to) {
    for (int i = 0; i < kBlock; i += 8) {
      const __m256 wide = _mm256_loadu_ps(reinterpret_cast<const float*>(bits + i));
      const __m128i half = _mm256_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), half);
    }
  }
#else
  static void load(const Storage* from, uint32_t* bits) {
    for (int i = 0; i < kBlock; ++i) {
      _Float16 half;
      std::memcpy(&half, from + i, 2);
      bits[i] = bits_of(float(half));
    }
  }
  static void store(const uint32_t* bits, Storage* to) {
    for (int i = 0; i < kBlock; ++i) {
      const _Float16 half = _Float16(float_of(bits[i]));
      std::memcpy(to + i, &half, 2);
    }
  }
#endif
};

// ---- walking over blocks -------------------------------------------------------------------

// A short block is worked on in zero-padded buffers, so every kernel sees 32 values.
template <class T>
struct Padded {
  typename T::Storage values[kBlock];
  Padded(const typename T::Storage* from, int count) {
    std::memset(values, 0, sizeof values);
    std::memcpy(values, from, count * sizeof(values[0]));
  }
};

template <class T>
inline void load_block(const typename T::Storage* from, int count, uint32_t* bits) {
  if (count == kBlock) T::load(from, bits);
  else T::load(Padded<T>(from, count).values, bits);
}

template <class T>
inline void store_block(const uint32_t* bits, int count, typename T::Storage* to) {
  if (count == kBlock) {
    T::store(bits, to);
  } else {
    typename T::Storage last[kBlock];
    T::store(bits, last);
    std::memcpy(to, last, count * sizeof(last[0]));
  }
}

// Like store_block, for values that may be NaN: bf16 stores by integer arithmetic, which breaks NaN.
template <class T>
inline void store_with_nan(const uint32_t* bits, int count, typename T::Storage* to) {
  typename T::Storage stored[kBlock];
  T::store(bits, stored);
  for (int i = 0; i < kBlock; ++i)
    stored[i] = (bits[i] & kMagnitude) > kInf ? T::kNan : stored[i];
  std::memcpy(to, stored, count * sizeof(stored[0]));
}

// Calls body(chunk, offset, block, count) for every block: `offset` in elements, `block` counts
// blocks of the whole tensor, `count` values stand in it. Chunks run in parallel.
template <class Body>
void for_each_block(int64_t rows, int64_t n, int threads, Body body) {
  if (n % kBlock == 0) {  // no short blocks: one long row
    n *= rows;
    rows = n > 0;
  }
  const int64_t per_row = (n + kBlock - 1) / kBlock, blocks = rows * per_row;
  const int64_t chunks = (blocks + kChunk - 1) / kChunk;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = chunk * kChunk;
    const int64_t last = first + kChunk < blocks ? first + kChunk : blocks;
    int64_t row = first / per_row, column = first % per_row;
    for (int64_t block = first; block < last; ++block) {
      const int64_t left = n - column * kBlock;
      body(chunk, row * n + column * kBlock, block, int(left < kBlock ? left : kBlock));
      if (++column == per_row) column = 0, ++row;
    }
  }
}

inline uint32_t largest_magnitude(const uint32_t* bits) {
  uint32_t largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = bits[i] & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;  // >= kInf when any value is NaN or Inf
}

// ---- MX formats ----------------------------------------------------------------------------

struct Format {
  int emin, emax, mantissa, max_code, nan_code, sign_shift, rule;
  float max_normal;
};

enum Rule { kFloor, kCeil, kEven, kRceil, kMse };

inline int scale_exponent(uint32_t amax, const Format& f) {
  constexpr uint32_t mantissa = (1u << kMantissaBits) - 1;
  if (f.rule == kEven) amax += 1u << (kMantissaBits - f.mantissa - 1);
  int exponent = int(amax >> kMantissaBits) - kBias - f.emax;
  if (f.rule == kCeil) exponent += (amax & mantissa) != 0;
  if (f.rule == kRceil) exponent += (amax & mantissa) > (bits_of(f.max_normal) & mantissa);
  return exponent < -kBias ? -kBias : exponent > kBias ? kBias : exponent;
}

// Biased exponent of the binade of `scaled`, kept within the format's normal range.
inline int32_t clamped_exponent(float scaled, int32_t low, int32_t high) {
  const int32_t exponent = int32_t(bits_of(scaled) >> kMantissaBits);
  return exponent < low ? low : exponent > high ? high : exponent;
}

// Nearest value of the element grid, which goes on beyond max_normal.
inline float unclamped_round(float scaled, const Format& f) {
  const int32_t binade = clamped_exponent(scaled, f.emin + kBias, f.emax + kBias);
  const float c = float_of(uint32_t(binade + kMantissaBits - f.mantissa) << kMantissaBits);
  return (scaled + c) - c;
}

inline float round_magnitude(float scaled, const Format& f) {
  const float rounded = unclamped_round(scaled, f);
  return rounded < f.max_normal ? rounded : f.max_normal;
}

// The rule mse, also for the order of the sums: see dmx.numerics.scaling.
inline int least_squares_exponent(const uint32_t* bits, int floor, const Format& f) {
  const float inverse = power_of_two(-floor);
  int best = floor;
  float least = __builtin_inff();
  for (int offset = 2; offset >= -1; --offset) {
    const int wanted = floor + offset;
    const int exponent = wanted < -kBias ? -kBias : wanted > kBias ? kBias : wanted;
    const float step = power_of_two(exponent - floor), inverse_step = power_of_two(floor - exponent);
    float errors[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float x = float_of(bits[i] & kMagnitude) * inverse;
      const float error = x - round_magnitude(x * inverse_step, f) * step;
      errors[i] = error * error;
    }
    for (int n = kBlock / 2; n > 0; n /= 2)
      for (int i = 0; i < n; ++i) errors[i] = errors[2 * i] + errors[2 * i + 1];
    if (errors[0] < least) least = errors[0], best = exponent;
  }
  return best;
}

inline int block_exponent(const uint32_t* bits, uint32_t amax, const Format& f) {
  const int exponent = scale_exponent(amax, f);
  if (f.rule != kMse) return exponent;
  return amax ? least_squares_exponent(bits, exponent, f) : -kBias;
}

template <class T>
void fake_quant(const void* x, void* out, int64_t rows, int64_t n, const Format& f, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  Storage* to = static_cast<Storage*>(out);
  for_each_block(rows, n, threads, [=](int64_t, int64_t offset, int64_t, int count) {
    uint32_t bits[kBlock];
    load_block<T>(from + offset, count, bits);
    const uint32_t amax = largest_magnitude(bits);
    if (amax >= kInf) {
      for (int i = 0; i < count; ++i) to[offset + i] = T::kNan;
      return;
    }
    const int exponent = block_exponent(bits, amax, f);
    const float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = float_of(bits[i] & kMagnitude) * inverse;
      bits[i] = bits_of(round_magnitude(scaled, f) * scale) | (bits[i] & kSign);
    }
    store_block<T>(bits, count, to + offset);
  });
}

// Codes of a whole block as bytes; layouts as in dmx.numerics.packing. 4 * bits bytes. Neighbours are pushed together,
// then pairs of neighbours, and so on: loops over the words of one size, so that they are vectorized.
template <int bits>
inline void pack(const uint8_t* codes, uint8_t* to) {
  if (bits == 8) {
    std::memcpy(to, codes, kBlock);
    return;
  }
  constexpr uint32_t low = (1u << bits) - 1;
  uint32_t fours[kBlock / 4];
  uint64_t eights[kBlock / 8];
  std::memcpy(fours, codes, kBlock);
  for (uint32_t& w : fours) {
    w = (w & low * 0x10001u) | (w & low * 0x1000100u) >> (8 - bits);
    w = (w & 0xffffu) | (w >> 16) << (2 * bits);
  }
  std::memcpy(eights, fours, kBlock);
  for (uint64_t& w : eights) w = (w & 0xffffffffu) | (w >> 32) << (4 * bits);
  for (int i = 0; i < kBlock / 8; ++i) std::memcpy(to + i * bits, eights + i, bits);
}

// packed_bits: 8 for a byte a code; 4 or 6 pack, and then rows hold whole blocks only.
template <class T, int packed_bits>
void quantize_as(const void* x, uint8_t* codes, uint8_t* scale_codes, int64_t rows, int64_t n,
                 const Format& f, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  const int32_t low = f.emin + kBias, lift = kMantissaBits - f.mantissa;
  for_each_block(rows, n, threads, [=](int64_t, int64_t offset, int64_t block, int count) {
    uint32_t bits[kBlock];
    load_block<T>(from + offset, count, bits);
    const uint32_t amax = largest_magnitude(bits);
    if (amax >= kInf) {
      // Formats of 4 and 6 bits have no NaN code: zeros, packed or not.
      std::memset(codes + offset * packed_bits / 8, f.nan_code, count * packed_bits / 8);
      scale_codes[block] = 255;
      return;
    }
    const int exponent = block_exponent(bits, amax, f);
    scale_codes[block] = uint8_t(exponent + kBias);
    const float inverse = power_of_two(-exponent);
    uint8_t result[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      const float scaled = float_of(bits[i] & kMagnitude) * inverse;
      // Not kept below emax: beyond it lie only values that max_code bounds all the same.
      const int32_t exponent = int32_t(bits_of(scaled) >> kMantissaBits);
      const int32_t binade = exponent < low ? low : exponent;
      const float sum = scaled + float_of(uint32_t(binade + lift) << kMantissaBits);
      // The low bits of the sum count steps; a carry out of the mantissa reaches the next binade.
      int32_t code = int32_t(bits_of(sum) & 0x7fffffu) + ((binade - low) << f.mantissa);
      code = code < f.max_code ? code : f.max_code;
      // A shift to the right, so that code and sign become a byte together and not each by itself.
      result[i] = uint8_t(code | int32_t((bits[i] & kSign) >> (31 - f.sign_shift)));
    }
    if (count == kBlock) pack<packed_bits>(result, codes + offset * packed_bits / 8);
    else std::memcpy(codes + offset, result, count);
  });
}

template <class T>
void quantize(const void* x, uint8_t* codes, uint8_t* scale_codes, int64_t rows, int64_t n,
              const Format& f, int packed_bits, int threads) {
  switch (packed_bits) {
    case 4: quantize_as<T, 4>(x, codes, scale_codes, rows, n, f, threads); break;
    case 6: quantize_as<T, 6>(x, codes, scale_codes, rows, n, f, threads); break;
    default: quantize_as<T, 8>(x, codes, scale_codes, rows, n, f, threads);
  }
}

// ---- the continuous quantizer; names as in dmx.numerics.continuous ---------------------------

struct Path {
  float inv_step, step, e_max, low, top, dlog_step, dlog_emax, dtop;
};

// What one block needs beside the path, in units of 2^K.
struct Level {
  float scale, inverse, low, top, inverse_low, dlog_low, dtop;
};

inline Level level_of(uint32_t amax, const Path& p) {
  const int exponent = int(amax >> kMantissaBits) - kBias;
  const float excess = p.e_max - 127.0f - float(exponent);
  Level level;
  level.scale = power_of_two(exponent);
  level.inverse = power_of_two(-exponent);
  const bool is_widened = excess > 0.0f;
  const float widening = is_widened ? float(__builtin_exp2(double(excess))) : 1.0f;
  level.low = p.low * widening;
  level.top = p.top * widening;
  level.inverse_low = (1.0f / level.low) * p.inv_step;
  const float extra = widening > 1.0f ? p.dlog_emax : 2 * p.dlog_emax;
  level.dlog_low = p.dlog_step + extra;
  level.dtop = p.dtop * widening + (widening > 1.0f ? level.top * p.dlog_emax : 0.0f);
  return level;
}

struct Rounded {
  float ratio, rounded, step, value;
  bool is_low;
};

inline Rounded round_continuous(float magnitude, const Path& p, const Level& level) {
  constexpr float c = 8388608.0f;  // 2^23: adding it rounds to an integer
  const uint32_t binade = bits_of(magnitude) & kInf;
  Rounded r;
  r.is_low = float_of(binade) < level.low;
  // 1/binade has the exponent field 254 - field: exact.
  const float inverse = float_of(0x7f000000u - binade) * p.inv_step;
  r.ratio = magnitude * (r.is_low ? level.inverse_low : inverse);
  r.step = (r.is_low ? level.low : float_of(binade)) * p.step;
  r.rounded = (r.ratio + c) - c;
  r.value = r.rounded * r.step;
  return r;
}

template <class T>
void continuous(const void* x, void* out, int64_t rows, int64_t n, const Path& path, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  Storage* to = static_cast<Storage*>(out);
  for_each_block(rows, n, threads, [=](int64_t, int64_t offset, int64_t, int count) {
    uint32_t bits[kBlock];
    load_block<T>(from + offset, count, bits);
    const uint32_t amax = largest_magnitude(bits);
    if (amax >= kInf) {
      for (int i = 0; i < count; ++i) to[offset + i] = T::kNan;
      return;
    }
    const Level level = level_of(amax, path);
    for (int i = 0; i < kBlock; ++i) {
      const float magnitude = float_of(bits[i] & kMagnitude) * level.inverse;
      const Rounded r = round_continuous(magnitude, path, level);
      const float value = r.value > level.top ? level.top : r.value;
      bits[i] = bits_of(value * level.scale) | (bits[i] & kSign);
    }
    store_block<T>(bits, count, to + offset);
  });
}

// grad_x may be null: then only the sums are wanted. sums[chunk][i] receives the sum of
// grad * dy/db over the values that stand at place i of the chunk's blocks.
template <class T>
void continuous_backward(const void* grad, const void* x, void* grad_x, float* sums, int64_t rows,
                         int64_t n, const Path& path, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  const Storage* above = static_cast<const Storage*>(grad);
  Storage* to = static_cast<Storage*>(grad_x);
  for_each_block(rows, n, threads, [=](int64_t chunk, int64_t offset, int64_t, int count) {
    uint32_t bits[kBlock], grad_bits[kBlock];
    load_block<T>(from + offset, count, bits);
    load_block<T>(above + offset, count, grad_bits);
    const uint32_t amax = largest_magnitude(bits);
    float products[kBlock];
    if (amax >= kInf) {
      for (int i = 0; i < kBlock; ++i) products[i] = float_of(grad_bits[i]) * 0.0f;
      std::memset(grad_bits, 0, sizeof grad_bits);
    } else {
      const Level level = level_of(amax, path);
      for (int i = 0; i < kBlock; ++i) {
        const float magnitude = float_of(bits[i] & kMagnitude) * level.inverse;
        const Rounded r = round_continuous(magnitude, path, level);
        const float dlog = r.is_low ? level.dlog_low : path.dlog_step;
        const float inside = (r.ratio - r.rounded) * (r.step * dlog);
        const float slope = (r.value > level.top ? level.dtop : inside) * level.scale;
        products[i] = float_of(grad_bits[i] ^ (bits[i] & kSign)) * slope;
        grad_bits[i] = r.value > level.top ? 0u : grad_bits[i];
      }
    }
    for (int i = 0; i < kBlock; ++i) sums[chunk * kBlock + i] += products[i];
    if (!to) return;
    // The gradient came in this dtype, so storing it is exact, NaN included.
    store_block<T>(grad_bits, count, to + offset);
  });
}

// ---- the straight line between two formats; names as in dmx.numerics.line --------------------

struct Neighbour {
  float emin, emax, mantissa_bits, max_normal, rule;
  Format format() const {
    return {int(emin), int(emax), int(mantissa_bits), 0, 0, 0, int(rule), max_normal};
  }
};

struct Line {
  float share, slope;
  Neighbour low, high;
};

// values[i]: |Q(x)|; inside[i]: 1 where it is not clamped, else 0; may be null.
inline void quantize_magnitudes(const uint32_t* bits, uint32_t amax, const Format& f, float* values,
                                float* inside) {
  const int exponent = block_exponent(bits, amax, f);
  const float scale = power_of_two(exponent), inverse = power_of_two(-exponent);
  for (int i = 0; i < kBlock; ++i) {
    const float rounded = unclamped_round(float_of(bits[i] & kMagnitude) * inverse, f);
    values[i] = (rounded < f.max_normal ? rounded : f.max_normal) * scale;
    if (inside) inside[i] = rounded <= f.max_normal ? 1.0f : 0.0f;
  }
}

template <class T>
void line(const void* x, void* out, int64_t rows, int64_t n, const Line& path, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  Storage* to = static_cast<Storage*>(out);
  const Format below = path.low.format(), above = path.high.format();
  const float share = path.share, rest = 1.0f - path.share;
  for_each_block(rows, n, threads, [=](int64_t, int64_t offset, int64_t, int count) {
    uint32_t bits[kBlock];
    load_block<T>(from + offset, count, bits);
    const uint32_t amax = largest_magnitude(bits);
    if (amax >= kInf) {
      for (int i = 0; i < count; ++i) to[offset + i] = T::kNan;
      return;
    }
    float low[kBlock], high[kBlock];
    // A product with 0 would make NaN of Inf, which rules other than floor reach.
    quantize_magnitudes(bits, amax, share < 1.0f ? below : above, low, nullptr);
    if (share > 0.0f && share < 1.0f) {
      quantize_magnitudes(bits, amax, above, high, nullptr);
      for (int i = 0; i < kBlock; ++i) low[i] = rest * low[i] + share * high[i];
    }
    for (int i = 0; i < kBlock; ++i) bits[i] = bits_of(low[i]) | (bits[i] & kSign);
    store_block<T>(bits, count, to + offset);
  });
}

// As continuous_backward, but for path.slope: the sums are of grad * (Q_high - Q_low).
template <class T>
void line_backward(const void* grad, const void* x, void* grad_x, float* sums, int64_t rows,
                   int64_t n, const Line& path, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  const Storage* gradient = static_cast<const Storage*>(grad);
  Storage* to = static_cast<Storage*>(grad_x);
  const Format below = path.low.format(), above = path.high.format();
  const float share = path.share, rest = 1.0f - path.share;
  for_each_block(rows, n, threads, [=](int64_t chunk, int64_t offset, int64_t, int count) {
    uint32_t bits[kBlock], grad_bits[kBlock];
    load_block<T>(from + offset, count, bits);
    load_block<T>(gradient + offset, count, grad_bits);
    const uint32_t amax = largest_magnitude(bits);
    float products[kBlock];
    if (amax >= kInf) {
      for (int i = 0; i < kBlock; ++i) products[i] = float_of(grad_bits[i]) * 0.0f;
      std::memset(grad_bits, 0, sizeof grad_bits);
    } else {
      float low[kBlock], high[kBlock], in_low[kBlock], in_high[kBlock];
      quantize_magnitudes(bits, amax, below, low, in_low);
      quantize_magnitudes(bits, amax, above, high, in_high);
      for (int i = 0; i < kBlock; ++i) {
        const float difference = low[i] == high[i] ? 0.0f : high[i] - low[i];
        products[i] = float_of(grad_bits[i] ^ (bits[i] & kSign)) * difference;
        const float dx = rest * in_low[i] + share * in_high[i];
        grad_bits[i] = dx > 0.0f ? bits_of(float_of(grad_bits[i]) * dx) : 0u;
      }
    }
    for (int i = 0; i < kBlock; ++i) sums[chunk * kBlock + i] += products[i];
    if (!to) return;
    store_with_nan<T>(grad_bits, count, to + offset);
  });
}

// ---- scales that are numbers, given for each block; names as in dmx.numerics.scaled ------------

// Blocks are 16 values or whole rows, so a half of 32 values lies in one block.
constexpr int kHalf = kBlock / 2;

// Calls body(row, column, count) for 32 values at a time, fewer at the end of a row; rows run in parallel.
template <class Body>
void for_each_piece(int64_t rows, int64_t n, int threads, Body body) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < n; column += kBlock)
      body(row, column, int(n - column < kBlock ? n - column : kBlock));
}

// Blocks of the two halves of a piece; the second of a short piece may be the first again.
struct Halves {
  int64_t first, second;
  Halves(int64_t row, int64_t column, int64_t per_row, int64_t block_size) {
    const int64_t next = (column + kHalf) / block_size;
    first = row * per_row + column / block_size;
    second = row * per_row + (next < per_row ? next : per_row - 1);
  }
};

// Largest magnitude of each block, Inf or NaN where one value is; `amax` is zero before.
template <class T>
void block_amax(const void* x, float* amax, int64_t rows, int64_t n, int64_t block_size,
                int threads) {
  const auto* from = static_cast<const typename T::Storage*>(x);
  const int64_t per_row = (n + block_size - 1) / block_size;
  for_each_piece(rows, n, threads, [=](int64_t row, int64_t column, int count) {
    uint32_t bits[kBlock], largest[2] = {0, 0};
    load_block<T>(from + row * n + column, count, bits);
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < kHalf; ++i) {
        const uint32_t magnitude = bits[half * kHalf + i] & kMagnitude;
        largest[half] = magnitude > largest[half] ? magnitude : largest[half];
      }
    const Halves halves(row, column, per_row, block_size);
    const int64_t blocks[2] = {halves.first, halves.second};
    for (int half = 0; half < 2; ++half) {
      const uint32_t before = bits_of(amax[blocks[half]]);
      if (largest[half] > before) amax[blocks[half]] = float_of(largest[half]);
    }
  });
}

// values[i]: |Q(x)| of a half with one scale, NaN where that is; inside[i]: whether it is not clamped.
template <class Inside>
inline void scaled_half(const uint32_t* bits, float scale, const Format& f, float* values,
                        Inside* inside) {
  const float divisor = scale > 0.0f ? scale : 1.0f;
  for (int i = 0; i < kHalf; ++i) {
    const float rounded = unclamped_round(float_of(bits[i] & kMagnitude) / divisor, f);
    inside[i] = rounded <= f.max_normal;
    values[i] = (rounded < f.max_normal ? rounded : f.max_normal) * scale;
  }
}

// One of `out` (the dtype of x) and `wide` (float32) is written; `inside` may be null. A NaN scale makes its
// block NaN.
template <class T>
void scaled(const void* x, void* out, float* wide, uint8_t* inside, const float* scales,
            int64_t rows, int64_t n, int64_t block_size, const Format& f, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  Storage* to = static_cast<Storage*>(out);
  const int64_t per_row = (n + block_size - 1) / block_size;
  for_each_piece(rows, n, threads, [=](int64_t row, int64_t column, int count) {
    const int64_t at = row * n + column;
    const Halves halves(row, column, per_row, block_size);
    const float scale_of[2] = {scales[halves.first], scales[halves.second]};
    uint32_t bits[kBlock];
    load_block<T>(from + at, count, bits);
    uint8_t is_inside[kBlock];
    float values[kBlock];
    for (int half = 0; half < 2; ++half)
      scaled_half(bits + half * kHalf, scale_of[half], f, values + half * kHalf,
                  is_inside + half * kHalf);
    for (int i = 0; i < kBlock; ++i) bits[i] = bits_of(values[i]) | (bits[i] & kSign);
    if (wide) std::memcpy(wide + at, bits, 4 * count);
    else store_block<T>(bits, count, to + at);
    for (int i = 0; i < count; ++i) {
      if (scale_of[i / kHalf] == scale_of[i / kHalf]) {
        i += kHalf - 1;  // a half at a time
        continue;
      }
      if (wide) wide[at + i] = scale_of[i / kHalf];
      else to[at + i] = T::kNan;
      is_inside[i] = 1;
    }
    if (inside) std::memcpy(inside + at, is_inside, count);
  });
}

// ---- the line between two formats of which one is no MX format; names as in dmx.numerics.mixed_line ---

// Powers of two of MX blocks as numbers, NaN of blocks with NaN or Inf.
template <class T>
void mx_scales(const void* x, float* scales, int64_t rows, int64_t n, const Format& f,
               int threads) {
  const auto* from = static_cast<const typename T::Storage*>(x);
  for_each_block(rows, n, threads, [=](int64_t, int64_t offset, int64_t block, int count) {
    uint32_t bits[kBlock];
    load_block<T>(from + offset, count, bits);
    const uint32_t amax = largest_magnitude(bits);
    scales[block] =
        amax >= kInf ? __builtin_nanf("") : power_of_two(block_exponent(bits, amax, f));
  });
}

// scales: of each block, NaN where the block is; null for bf16, which leaves values as they are.
struct Side {
  const float* scales;
  int64_t block_size;
  Format format;
};

struct MixedLine {
  float share;
  Side low, high;
};

inline void side_magnitudes(const uint32_t* bits, const Side& side, int64_t row, int64_t column,
                            int64_t n, float* values, float* inside) {
  if (!side.scales) {
    for (int i = 0; i < kBlock; ++i) values[i] = float_of(bits[i] & kMagnitude), inside[i] = 1.0f;
    return;
  }
  const int64_t per_row = (n + side.block_size - 1) / side.block_size;
  const Halves halves(row, column, per_row, side.block_size);
  scaled_half(bits, side.scales[halves.first], side.format, values, inside);
  scaled_half(bits + kHalf, side.scales[halves.second], side.format, values + kHalf,
              inside + kHalf);
}

// share lies between the stops.
template <class T>
void mixed_line(const void* x, void* out, int64_t rows, int64_t n, const MixedLine& path,
                int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  Storage* to = static_cast<Storage*>(out);
  const float share = path.share, rest = 1.0f - path.share;
  for_each_piece(rows, n, threads, [=](int64_t row, int64_t column, int count) {
    const int64_t at = row * n + column;
    uint32_t bits[kBlock];
    load_block<T>(from + at, count, bits);
    float low[kBlock], high[kBlock], inside[kBlock];
    side_magnitudes(bits, path.low, row, column, n, low, inside);
    side_magnitudes(bits, path.high, row, column, n, high, inside);
    for (int i = 0; i < kBlock; ++i) low[i] = rest * low[i] + share * high[i];
    for (int i = 0; i < kBlock; ++i) bits[i] = bits_of(low[i]) | (bits[i] & kSign);
    store_with_nan<T>(bits, count, to + at);
  });
}

// grad_x may be null. sums hold 32 zeros for each kChunk pieces of a row: of grad * (Q_high - Q_low).
template <class T>
void mixed_line_backward(const void* grad, const void* x, void* grad_x, float* sums, int64_t rows,
                         int64_t n, const MixedLine& path, int threads) {
  using Storage = typename T::Storage;
  const Storage* from = static_cast<const Storage*>(x);
  const Storage* above = static_cast<const Storage*>(grad);
  Storage* to = static_cast<Storage*>(grad_x);
  const float share = path.share, rest = 1.0f - path.share;
  constexpr int64_t summed = kChunk * kBlock;
  const int64_t per_row = (n + summed - 1) / summed;
  for_each_piece(rows, n, threads, [=](int64_t row, int64_t column, int count) {
    const int64_t at = row * n + column;
    uint32_t bits[kBlock], grad_bits[kBlock];
    load_block<T>(from + at, count, bits);
    load_block<T>(above + at, count, grad_bits);
    float low[kBlock], high[kBlock], in_low[kBlock], in_high[kBlock];
    side_magnitudes(bits, path.low, row, column, n, low, in_low);
    side_magnitudes(bits, path.high, row, column, n, high, in_high);
    float* own = sums + (row * per_row + column / summed) * kBlock;
    for (int i = 0; i < kBlock; ++i) {
      const bool is_number = low[i] == low[i] && high[i] == high[i];
      const float difference = is_number && low[i] != high[i] ? high[i] - low[i] : 0.0f;
      own[i] += float_of(grad_bits[i] ^ (bits[i] & kSign)) * difference;
      const float dx = is_number ? rest * in_low[i] + share * in_high[i] : 0.0f;
      grad_bits[i] = dx > 0.0f ? bits_of(float_of(grad_bits[i]) * dx) : 0u;
    }
    if (!to) return;
    store_with_nan<T>(grad_bits, count, to + at);
  });
}

// ---- losses of rows of logits ----------------------------------------------------------------

// exp(x) for x <= 0 within 2 units in the last place; 0 where the result is below 2^-126. NaN stays.
// x = n ln2 + r with |r| <= ln2 / 2; the polynomial is that of Cephes' expf.
inline float exp_negative(float x) {
  const float kept = x < -87.0f ? -87.0f : x;
  const float c = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = kept * 1.44269504f + c, n = shifted - c;
  const float r = (kept - n * 0.693359375f) + n * 2.12194440e-4f;  // ln2 in two parts
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // The low bits of `shifted` hold n in two's complement.
  const float scaled = p * float_of((bits_of(shifted) + kBias) << kMantissaBits);
  return x < -87.0f ? 0.0f : scaled;
}

// 32 values from `at` on; those past the end of the row are -Inf, whose probability is 0.
template <class T>
inline void load_logits(const typename T::Storage* row, int64_t at, int64_t n, float* values) {
  uint32_t bits[kBlock];
  const int64_t left = n - at;
  if (left >= kBlock) {
    T::load(row + at, bits);
  } else {
    T::load(Padded<T>(row + at, int(left)).values, bits);
    for (int64_t i = left; i < kBlock; ++i) bits[i] = kInf | kSign;
  }
  std::memcpy(values, bits, sizeof bits);
}

// Sum of term(block start, 32 float results) over a row: at most 64 in float32, the rest in float64.
template <class Terms>
inline double sum_of_row(int64_t n, Terms terms) {
  double total = 0.0;
  for (int64_t chunk = 0; chunk < n; chunk += 64 * kBlock) {
    const int64_t end = chunk + 64 * kBlock < n ? chunk + 64 * kBlock : n;
    float lanes[kBlock] = {}, own[kBlock];
    for (int64_t at = chunk; at < end; at += kBlock) {
      terms(at, own);
      for (int i = 0; i < kBlock; ++i) lanes[i] += own[i];
    }
    for (int i = 0; i < kBlock; ++i) total += double(lanes[i]);
  }
  return total;
}

// log(sum(exp(logits))) of a row as largest + rest: probabilities are exp(logit - largest - rest).
struct Normalizer {
  float largest, rest;
};

template <class T>
inline Normalizer normalizer(const typename T::Storage* row, int64_t n) {
  float lanes[kBlock], values[kBlock];
  for (int i = 0; i < kBlock; ++i) lanes[i] = -__builtin_inff();
  for (int64_t at = 0; at < n; at += kBlock) {
    load_logits<T>(row, at, n, values);
    for (int i = 0; i < kBlock; ++i) lanes[i] = values[i] > lanes[i] ? values[i] : lanes[i];
  }
  float largest = lanes[0];
  for (int i = 1; i < kBlock; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  const double sum = sum_of_row(n, [=](int64_t at, float* own) {
    load_logits<T>(row, at, n, own);
    for (int i = 0; i < kBlock; ++i) own[i] = exp_negative(own[i] - largest);
  });
  return {largest, float(__builtin_log(sum))};
}

template <class T>
inline void store_gradient(const float* values, typename T::Storage* row, int64_t at, int64_t n) {
  uint32_t bits[kBlock];
  std::memcpy(bits, values, sizeof bits);
  const int64_t left = n - at;
  store_with_nan<T>(bits, int(left < kBlock ? left : kBlock), row + at);
}

template <class T>
void cross_entropy(const void* logits, const int64_t* targets, void* gradient, float scale,
                   float* losses, int64_t rows, int64_t n, int threads) {
  using Storage = typename T::Storage;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const Storage* row = static_cast<const Storage*>(logits) + r * n;
    Storage* out = gradient ? static_cast<Storage*>(gradient) + r * n : nullptr;
    const int64_t target = targets[r];
    if (target < 0) {
      losses[r] = 0.0f;
      if (out) std::memset(out, 0, n * sizeof(Storage));
      continue;
    }
    const Normalizer z = normalizer<T>(row, n);
    float values[kBlock];
    load_logits<T>(row, target, n, values);
    losses[r] = z.rest - (values[0] - z.largest);
    if (!out) continue;
    for (int64_t at = 0; at < n; at += kBlock) {
      load_logits<T>(row, at, n, values);
      for (int i = 0; i < kBlock; ++i)
        values[i] = exp_negative((values[i] - z.largest) - z.rest);
      if (target >= at && target < at + kBlock) values[target - at] -= 1.0f;
      for (int i = 0; i < kBlock; ++i) values[i] *= scale;
      store_gradient<T>(values, out, at, n);
    }
  }
}

// normalized: `reference` holds log probabilities.
template <class R, class T>
void kl(const void* reference, const void* logits, void* gradient, float scale, int normalized,
        float* losses, int64_t rows, int64_t n, int threads) {
  using Storage = typename T::Storage;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t r = 0; r < rows; ++r) {
    const auto* wanted = static_cast<const typename R::Storage*>(reference) + r * n;
    const Storage* row = static_cast<const Storage*>(logits) + r * n;
    const Normalizer y = normalized ? Normalizer{0.0f, 0.0f} : normalizer<R>(wanted, n);
    const Normalizer z = normalizer<T>(row, n);
    Storage* out = gradient ? static_cast<Storage*>(gradient) + r * n : nullptr;
    const double sum = sum_of_row(n, [=](int64_t at, float* own) {
      float log_q[kBlock], log_p[kBlock], q[kBlock];
      load_logits<R>(wanted, at, n, log_q);
      load_logits<T>(row, at, n, log_p);
      for (int i = 0; i < kBlock; ++i) {
        log_q[i] = (log_q[i] - y.largest) - y.rest;
        log_p[i] = (log_p[i] - z.largest) - z.rest;
        q[i] = exp_negative(log_q[i]);
        const float term = q[i] * (log_q[i] - log_p[i]);
        own[i] = q[i] == 0.0f ? 0.0f : term;
      }
      if (!out) return;
      for (int i = 0; i < kBlock; ++i) log_p[i] = (exp_negative(log_p[i]) - q[i]) * scale;
      store_gradient<T>(log_p, out, at, n);
    });
    losses[r] = float(sum);
  }
}

template <class T>
void kl_of(int wide_reference, const void* reference, const void* logits, void* gradient,
           float scale, int normalized, float* losses, int64_t rows, int64_t n, int threads) {
  if (wide_reference)
    kl<Float32, T>(reference, logits, gradient, scale, normalized, losses, rows, n, threads);
  else
    kl<T, T>(reference, logits, gradient, scale, normalized, losses, rows, n, threads);
}

}  // namespace

// dtype: 0 fp32, 1 bf16, 2 fp16.
#define DMX_DISPATCH(dtype, function, ...)                    \
  switch (dtype) {                                            \
    case 0: function<Float32>(__VA_ARGS__); break;            \
    case 1: function<BFloat16>(__VA_ARGS__); break;           \
    default: function<Float16>(__VA_ARGS__);                  \
  }

extern "C" {

void dmx_fake_quant(int dtype, const void* x, void* out, int64_t rows, int64_t n, const Format* f,
                    int threads) {
  DMX_DISPATCH(dtype, fake_quant, x, out, rows, n, *f, threads)
}

void dmx_quantize(int dtype, const void* x, void* codes, void* scale_codes, int64_t rows, int64_t n,
                  const Format* f, int packed_bits, int threads) {
  DMX_DISPATCH(dtype, quantize, x, static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scale_codes),
               rows, n, *f, packed_bits, threads)
}

void dmx_continuous(int dtype, const void* x, void* out, int64_t rows, int64_t n, const Path* path,
                    int threads) {
  DMX_DISPATCH(dtype, continuous, x, out, rows, n, *path, threads)
}

// `sums` holds 32 zeros for each 256 blocks; their total is the gradient by the offset.
void dmx_continuous_backward(int dtype, const void* grad, const void* x, void* grad_x, void* sums,
                             int64_t rows, int64_t n, const Path* path, int threads) {
  DMX_DISPATCH(dtype, continuous_backward, grad, x, grad_x, static_cast<float*>(sums), rows, n,
               *path, threads)
}

void dmx_line(int dtype, const void* x, void* out, int64_t rows, int64_t n, const Line* path,
              int threads) {
  DMX_DISPATCH(dtype, line, x, out, rows, n, *path, threads)
}

void dmx_line_backward(int dtype, const void* grad, const void* x, void* grad_x, void* sums,
                       int64_t rows, int64_t n, const Line* path, int threads) {
  DMX_DISPATCH(dtype, line_backward, grad, x, grad_x, static_cast<float*>(sums), rows, n, *path,
               threads)
}

void dmx_mx_scales(int dtype, const void* x, void* scales, int64_t rows, int64_t n,
                   const Format* f, int threads) {
  DMX_DISPATCH(dtype, mx_scales, x, static_cast<float*>(scales), rows, n, *f, threads)
}

void dmx_mixed_line(int dtype, const void* x, void* out, int64_t rows, int64_t n,
                    const MixedLine* path, int threads) {
  DMX_DISPATCH(dtype, mixed_line, x, out, rows, n, *path, threads)
}

void dmx_mixed_line_backward(int dtype, const void* grad, const void* x, void* grad_x, void* sums,
                             int64_t rows, int64_t n, const MixedLine* path, int threads) {
  DMX_DISPATCH(dtype, mixed_line_backward, grad, x, grad_x, static_cast<float*>(sums), rows, n,
               *path, threads)
}

void dmx_block_amax(int dtype, const void* x, void* amax, int64_t rows, int64_t n,
                    int64_t block_size, int threads) {
  DMX_DISPATCH(dtype, block_amax, x, static_cast<float*>(amax), rows, n, block_size, threads)
}

// out or wide is null.
void dmx_scaled(int dtype, const void* x, void* out, void* wide, void* inside, const void* scales,
                int64_t rows, int64_t n, int64_t block_size, const Format* f, int threads) {
  DMX_DISPATCH(dtype, scaled, x, out, static_cast<float*>(wide), static_cast<uint8_t*>(inside),
               static_cast<const float*>(scales), rows, n, block_size, *f, threads)
}

// gradient may be null. A negative target: loss and gradient 0.
void dmx_cross_entropy(int dtype, const void* logits, const void* targets, void* gradient,
                       float scale, void* losses, int64_t rows, int64_t n, int threads) {
  DMX_DISPATCH(dtype, cross_entropy, logits, static_cast<const int64_t*>(targets), gradient, scale,
               static_cast<float*>(losses), rows, n, threads)
}

// wide_reference: the reference is fp32, whatever the logits are; else it is of their dtype.
void dmx_kl(int dtype, int wide_reference, const void* reference, const void* logits,
            void* gradient, float scale, int normalized, void* losses, int64_t rows, int64_t n,
            int threads) {
  DMX_DISPATCH(dtype, kl_of, wide_reference, reference, logits, gradient, scale, normalized,
               static_cast<float*>(losses), rows, n, threads)
}

}  // extern "C"
