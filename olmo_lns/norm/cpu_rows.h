// One row of a norm, forward and backward. All arithmetic is fp32; bf16 is widened when read, and the result rounded.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace olmo_lns {

struct Norm {
  float eps, scale;
  float offset;    // 1 where the gain is weight + 1
  float centered;  // 1: LayerNorm, 0: RMSNorm
};

struct Bf16 {  // bare bits: compilers do not vectorize c10's conversions
  uint16_t bits;
};

inline float widened(float x) { return x; }

inline float widened(Bf16 x) { return std::bit_cast<float>(uint32_t(x.bits) << 16); }

inline void round_to(float& y, float x) { y = x; }

inline void round_to(Bf16& y, float x) {  // to the nearest, ties to even; NaN stays NaN
  const uint32_t bits = std::bit_cast<uint32_t>(x), rounded = bits + 0x7fff + ((bits >> 16) & 1);
  y.bits = uint16_t((x == x ? rounded : 0x7fc00000u) >> 16);
}

// A row is read several times: in place, or, where it is bf16 and short, after the first time out of a buffer that L1
// has room for.
template <typename T>
struct InPlace {
  using Element = T;
  const T* values;
  InPlace(const T* row, float*) : values(row) {}
  float first(int64_t i) const { return widened(values[i]); }
  float again(int64_t i) const { return widened(values[i]); }
};

struct Buffered {
  using Element = Bf16;
  const Bf16* values;
  float* buffer;
  Buffered(const Bf16* row, float* to) : values(row), buffer(to) {}
  float first(int64_t i) const { return buffer[i] = widened(values[i]); }
  float again(int64_t i) const { return buffer[i]; }
};

constexpr int64_t SHORT = 1024;  // numbers in a row

template <typename T, typename Term>
inline void fill(T* y, int64_t width, const Term& term) {
#pragma omp simd
  for (int64_t i = 0; i < width; i++) round_to(y[i], term(i));
}

// A sum in many chains: a single one waits for every addition, and rounds more.
constexpr int64_t CHAINS = 16;

template <typename Term>
float sum(int64_t count, const Term& term) {
  float chains[CHAINS] = {}, total = 0;
  int64_t i = 0;
  for (; i + CHAINS <= count; i += CHAINS) {
    for (int64_t j = 0; j < CHAINS; j++) chains[j] += term(i + j);
  }
  for (; i < count; i++) total += term(i);
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < CHAINS; j++) total += chains[j];
  return total;
}

// y = (x - mean) * rstd * gain + shift, with the scale in gain and shift. Kept: mean and rstd (RMSNorm: 0 and 1/rms).
template <typename Row>
void forward_row(Row x, const float* gain, const float* shift, typename Row::Element* y, float* kept, int64_t width,
                 const Norm& norm) {
  float mean = 0, squares = 0;
  if (norm.centered) {
    mean = sum(width, [=](int64_t i) { return x.first(i); }) / width;
    squares = sum(width, [=](int64_t i) { return (x.again(i) - mean) * (x.again(i) - mean); });
    if (squares < 1e-4f * mean * mean * width) {  // nearly constant: what the mean is off by shows
      mean += sum(width, [=](int64_t i) { return x.again(i) - mean; }) / width;
      squares = sum(width, [=](int64_t i) { return (x.again(i) - mean) * (x.again(i) - mean); });
    }
  } else {
    squares = sum(width, [=](int64_t i) {
      const float value = x.first(i);
      return value * value;
    });
  }
  const float rstd = float(1 / std::sqrt(double(squares) / width + double(norm.eps)));
  if (shift) {
    fill(y, width, [=](int64_t i) { return (x.again(i) - mean) * rstd * gain[i] + shift[i]; });
  } else {
    fill(y, width, [=](int64_t i) { return (x.again(i) - mean) * rstd * gain[i]; });
  }
  kept[0] = mean;
  kept[1] = rstd;
}

// With h = (x - mean) * rstd and g = gain * dy: dx = rstd * (g - mean(g) - h * mean(g * h)), RMSNorm without mean(g).
// The row's part of the sums of dy * h and of dy is added, where they are wanted.
template <typename Row>
void backward_row(Row dy, Row x, const float* gain, const float* kept, typename Row::Element* dx, float* dweight,
                  float* dbias, int64_t width, const Norm& norm) {
  const float mean = kept[0], rstd = kept[1];
  float all = 0, along = 0;
#pragma omp simd reduction(+ : all, along)
  for (int64_t i = 0; i < width; i++) {
    const float g = dy.first(i) * gain[i];
    all += g;
    along += g * (x.first(i) - mean);
  }
  all = norm.centered ? all / width : 0;
  along *= rstd * rstd / width;
  if (dx) {
    fill(dx, width, [=](int64_t i) { return rstd * (dy.again(i) * gain[i] - all - (x.again(i) - mean) * along); });
  }
  if (dweight) fill(dweight, width, [=](int64_t i) { return dweight[i] + dy.again(i) * ((x.again(i) - mean) * rstd); });
  if (dbias) fill(dbias, width, [=](int64_t i) { return dbias[i] + dy.again(i); });
}

}  // namespace olmo_lns
