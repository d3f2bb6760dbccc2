/* The first convolution of a network that sees pixels: 8 x 8 with stride 4, straight from uint8, one thread.
 *
 * torch's takes two thirds of an update of a small network: its kernels want many channels, and pixels as float32 in
 * memory first. Here a vector holds 8 output channels, so that each multiplication takes one pixel for all of them, and
 * 10 sums stay in registers. For x86-64 with AVX2 and FMA; apex/pixel_convolution.py does the same by torch without.
 */
#include <stdint.h>

#define KERNEL 8
#define STRIDE 4
#define LANES 8 /* output channels in a vector */

struct shape {
    int64_t batch, channels, height, width, outputs; /* outputs: a multiple of LANES */
};

#if defined(__x86_64__) && defined(__GNUC__)

#define FAST __attribute__((target("avx2,fma")))
#define PART static inline __attribute__((always_inline, target("avx2,fma")))
#define MOST_SUMS 10 /* vectors that stay in registers beside weights and pixels */
#define VECTOR(floats, number) (*(vector *)(uintptr_t)((floats) + (number) * LANES))
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static int64_t places(int64_t pixels) { return (pixels - KERNEL) / STRIDE + 1; }

/* One image as float32, where each pixel is read some 8 times. */
FAST static void convert(const uint8_t *image, float *pixels, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        pixels[i] = (float)image[i];
}

/* `num` neighbouring places of a row, `vectors` vectors of channels; both are constants wherever this is called.
 *
 * A pixel lies in two neighbouring places, STRIDE further to the left in the second: it is fetched once for both.
 */
PART void forward(const int num, const int vectors, const struct shape *shape, const float *pixels, const float *weight,
                  const float *bias, float *out)
{
    int64_t outputs = shape->outputs;
    vector sums[MOST_SUMS];
    for (int p = 0; p < num; p++)
        for (int v = 0; v < vectors; v++)
            sums[p * vectors + v] = VECTOR(bias, v);
    for (int64_t c = 0; c < shape->channels; c++)
        for (int y = 0; y < KERNEL; y++, weight += KERNEL * outputs) {
            const float *row = pixels + (c * shape->height + y) * shape->width;
#pragma GCC unroll 1
            for (int x = 0; x < STRIDE; x++) {
                vector left[2], right[2];
                for (int v = 0; v < vectors; v++) {
                    left[v] = VECTOR(weight + x * outputs, v);
                    right[v] = VECTOR(weight + (x + STRIDE) * outputs, v);
                }
#pragma GCC unroll 11
                for (int p = 0; p <= num; p++) {
                    float pixel = row[p * STRIDE + x];
                    for (int v = 0; v < vectors; v++) {
                        if (p < num)
                            sums[p * vectors + v] += left[v] * pixel;
                        if (p > 0)
                            sums[(p - 1) * vectors + v] += right[v] * pixel;
                    }
                }
            }
        }
    for (int p = 0; p < num; p++)
        for (int v = 0; v < vectors; v++)
            VECTOR(out + p * outputs, v) = sums[p * vectors + v];
}

/* One row of places: as many at once as registers hold, then one by one. */
PART void forward_row(const int num, const int vectors, const struct shape *shape, const float *pixels,
                      const float *weight, const float *bias, float *out)
{
    int64_t columns = places(shape->width), x = 0;
    for (; x + num <= columns; x += num)
        forward(num, vectors, shape, pixels + x * STRIDE, weight, bias, out + x * shape->outputs);
    for (; x < columns; x++)
        forward(1, vectors, shape, pixels + x * STRIDE, weight, bias, out + x * shape->outputs);
}

FAST static void forward_one_vector(const struct shape *shape, const float *pixels, const float *weight,
                                    const float *bias, float *out)
{
    forward_row(MOST_SUMS, 1, shape, pixels, weight, bias, out);
}

FAST static void forward_two_vectors(const struct shape *shape, const float *pixels, const float *weight,
                                     const float *bias, float *out)
{
    forward_row(MOST_SUMS / 2, 2, shape, pixels, weight, bias, out);
}

/* images:  uint8[batch, channels, height, width]
 * weight:  float32[channels, KERNEL, KERNEL, outputs]
 * bias:    float32[outputs]
 * scratch: float32[channels, height, width]
 * out:     float32[batch, places of height, places of width, outputs]
 */
void apex_convolve(const struct shape *shape, const uint8_t *images, const float *weight, const float *bias,
                   float *scratch, float *out)
{
    int64_t size = shape->channels * shape->height * shape->width, outputs = shape->outputs;
    int64_t rows = places(shape->height), row_size = places(shape->width) * outputs;
    for (int64_t b = 0; b < shape->batch; b++) {
        convert(images + b * size, scratch, size);
        for (int64_t y = 0; y < rows; y++, out += row_size) {
            const float *pixels = scratch + y * STRIDE * shape->width;
            int64_t o = 0;
            for (; o + 2 * LANES <= outputs; o += 2 * LANES)
                forward_two_vectors(shape, pixels, weight + o, bias + o, out + o);
            if (o < outputs)
                forward_one_vector(shape, pixels, weight + o, bias + o, out + o);
        }
    }
}

/* Adds one image's share to a row of the kernel: `num` of its first STRIDE columns, and those STRIDE further on.
 *
 * Each pixel is again fetched once, for the place of which it is in the left half and the one of which in the right.
 */
PART void backward(const int num, const int vectors, const struct shape *shape, const float *pixels,
                   const float *gradient, float *weight_gradient)
{
    int64_t rows = places(shape->height), columns = places(shape->width), outputs = shape->outputs;
    vector left[4], right[4]; /* num * vectors of them are used */
    for (int x = 0; x < num; x++)
        for (int v = 0; v < vectors; v++) {
            left[x * vectors + v] = VECTOR(weight_gradient + x * outputs, v);
            right[x * vectors + v] = VECTOR(weight_gradient + (x + STRIDE) * outputs, v);
        }
    for (int64_t i = 0; i < rows; i++) {
        const float *row = pixels + i * STRIDE * shape->width;
        vector before[2] = {{0}, {0}}, here[2];
        for (int64_t j = 0; j < columns; j++, row += STRIDE, gradient += outputs) {
            for (int v = 0; v < vectors; v++)
                here[v] = VECTOR(gradient, v);
            for (int x = 0; x < num; x++)
                for (int v = 0; v < vectors; v++) {
                    left[x * vectors + v] += here[v] * row[x];
                    right[x * vectors + v] += before[v] * row[x];
                }
            for (int v = 0; v < vectors; v++)
                before[v] = here[v];
        }
        for (int x = 0; x < num; x++)
            for (int v = 0; v < vectors; v++)
                right[x * vectors + v] += before[v] * row[x];
    }
    for (int x = 0; x < num; x++)
        for (int v = 0; v < vectors; v++) {
            VECTOR(weight_gradient + x * outputs, v) = left[x * vectors + v];
            VECTOR(weight_gradient + (x + STRIDE) * outputs, v) = right[x * vectors + v];
        }
}

FAST static void backward_one_vector(const struct shape *shape, const float *pixels, const float *gradient,
                                     float *weight_gradient)
{
    backward(STRIDE, 1, shape, pixels, gradient, weight_gradient);
}

FAST static void backward_two_vectors(const struct shape *shape, const float *pixels, const float *gradient,
                                      float *weight_gradient)
{
    for (int x = 0; x < STRIDE; x += 2)
        backward(2, 2, shape, pixels + x, gradient, weight_gradient + x * shape->outputs);
}

/* images, scratch: as above
 * gradient:        float32[batch, places of height, places of width, outputs], of what `apex_convolve` gave
 * weight_gradient: float32[channels, KERNEL, KERNEL, outputs], to which it is added
 */
void apex_convolve_weight_gradient(const struct shape *shape, const uint8_t *images, const float *gradient,
                                   float *scratch, float *weight_gradient)
{
    int64_t plane = shape->height * shape->width, size = shape->channels * plane, outputs = shape->outputs;
    int64_t gradient_size = places(shape->height) * places(shape->width) * outputs;
    for (int64_t b = 0; b < shape->batch; b++, gradient += gradient_size) {
        convert(images + b * size, scratch, size);
        for (int64_t row = 0; row < shape->channels * KERNEL; row++) {
            const float *pixels = scratch + row / KERNEL * plane + row % KERNEL * shape->width;
            float *to = weight_gradient + row * KERNEL * outputs;
            int64_t o = 0;
            for (; o + 2 * LANES <= outputs; o += 2 * LANES)
                backward_two_vectors(shape, pixels, gradient + o, to + o);
            if (o < outputs)
                backward_one_vector(shape, pixels, gradient + o, to + o);
        }
    }
}

int64_t apex_convolution_works(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#else

void apex_convolve(void) {}
void apex_convolve_weight_gradient(void) {}
int64_t apex_convolution_works(void) { return 0; }

#endif

/* Of the functions' arguments, as in decompress.c. */
const int64_t apex_interface = 1;
