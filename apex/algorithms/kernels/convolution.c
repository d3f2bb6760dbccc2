/* Convolutions of networks for images, for x86-64 with AVX2 and FMA. On other processors, torch computes them.
 *
 * The first convolution is 8 x 8 with stride 4 and reads uint8. torch needs two thirds of the update of a small network
 * for it, because its kernels are slow with few channels and first convert the pixels to float32 in memory. Here a
 * vector holds 8 output channels: each instruction multiplies one pixel with all of them, and 10 sums stay in
 * registers. The other convolutions are products of small matrices, read from the images without a copy. Each call
 * uses one thread.
 */
#include <stdint.h>
#include <string.h>

#define KERNEL 8
#define STRIDE 4
#define LANES 8 /* output channels in a vector */

struct shape {
    int64_t batch, channels, height, width, outputs; /* outputs: a multiple of LANES */
    int64_t rectified;                               /* 1: also apply a ReLU */
};

#if defined(__x86_64__) && defined(__GNUC__)

#define FAST __attribute__((target("avx2,fma")))
#define PART static inline __attribute__((always_inline, target("avx2,fma")))
#define MOST_SUMS 10 /* vectors of sums in registers, beside weights and pixels */
#define MOST_ROWS 6  /* rows of sums in registers, two vectors each */
#define VECTOR(floats, number) (*(vector *)(uintptr_t)((floats) + (number) * LANES))
typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static int64_t output_size(int64_t pixels) { return (pixels - KERNEL) / STRIDE + 1; }

/* Converts one image to float32, because each pixel is read about 8 times. */
FAST static void convert(const uint8_t *image, float *pixels, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        pixels[i] = (float)image[i];
}

/* Applies a ReLU; NaN stays NaN. */
FAST static void rectify(float *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        numbers[i] = numbers[i] < 0 ? 0 : numbers[i];
}

/* Computes `num` neighbouring outputs of a row and `vectors` vectors of channels. Both are constants in every call.
 *
 * A pixel belongs to the windows of two neighbouring outputs, in the second STRIDE further to the left. It is loaded
 * once for both.
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

/* Computes one row of outputs in blocks of nearly equal size that fit into registers: a block of few sums waits for each
 * instruction, because the next one adds to the same sum. */
#define ROW(num, vectors) \
    case (num): \
        forward(num, vectors, shape, pixels + x * STRIDE, weight, bias, out + x * shape->outputs); \
        break;

FAST static void forward_one_vector(const struct shape *shape, const float *pixels, const float *weight,
                                    const float *bias, float *out)
{
    int64_t columns = output_size(shape->width), blocks = (columns + MOST_SUMS - 1) / MOST_SUMS;
    for (int64_t block = 0, x = 0, end; block < blocks; block++, x = end) {
        end = columns * (block + 1) / blocks;
        switch (end - x) {
            ROW(1, 1) ROW(2, 1) ROW(3, 1) ROW(4, 1) ROW(5, 1) ROW(6, 1) ROW(7, 1) ROW(8, 1) ROW(9, 1) ROW(10, 1)
        }
    }
}

FAST static void forward_two_vectors(const struct shape *shape, const float *pixels, const float *weight,
                                     const float *bias, float *out)
{
    int64_t columns = output_size(shape->width), blocks = (2 * columns + MOST_SUMS - 1) / MOST_SUMS;
    for (int64_t block = 0, x = 0, end; block < blocks; block++, x = end) {
        end = columns * (block + 1) / blocks;
        switch (end - x) {
            ROW(1, 2) ROW(2, 2) ROW(3, 2) ROW(4, 2) ROW(5, 2)
        }
    }
}

/* images:  uint8[batch, channels, height, width]
 * weight:  float32[channels, KERNEL, KERNEL, outputs]
 * bias:    float32[outputs]
 * scratch: float32[channels, height, width]
 * out:     float32[batch, output height, output width, outputs]
 */
FAST void apex_convolve(const struct shape *shape, const uint8_t *images, const float *weight, const float *bias,
                        float *scratch, float *out)
{
    int64_t size = shape->channels * shape->height * shape->width, outputs = shape->outputs;
    int64_t rows = output_size(shape->height), row_size = output_size(shape->width) * outputs;
    for (int64_t b = 0; b < shape->batch; b++) {
        convert(images + b * size, scratch, size);
        for (int64_t y = 0; y < rows; y++, out += row_size) {
            const float *pixels = scratch + y * STRIDE * shape->width;
            int64_t o = 0;
            for (; o + 2 * LANES <= outputs; o += 2 * LANES)
                forward_two_vectors(shape, pixels, weight + o, bias + o, out + o);
            if (o < outputs)
                forward_one_vector(shape, pixels, weight + o, bias + o, out + o);
            if (shape->rectified)
                rectify(out, row_size);
        }
    }
}

/* Adds one image's gradient to a row of the kernel: to `num` of its first STRIDE columns, and to those STRIDE later.
 *
 * Each pixel is loaded once for the two windows to which it belongs.
 */
PART void backward(const int num, const int vectors, const struct shape *shape, const float *pixels,
                   const float *gradient, float *weight_gradient)
{
    int64_t rows = output_size(shape->height), columns = output_size(shape->width), outputs = shape->outputs;
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
 * gradient:        float32[batch, output height, output width, outputs], of the output of `apex_convolve`
 * weight_gradient: float32[channels, KERNEL, KERNEL, outputs], incremented by the result
 */
void apex_convolve_weight_gradient(const struct shape *shape, const uint8_t *images, const float *gradient,
                                   float *scratch, float *weight_gradient)
{
    int64_t plane = shape->height * shape->width, size = shape->channels * plane, outputs = shape->outputs;
    int64_t gradient_size = output_size(shape->height) * output_size(shape->width) * outputs;
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

/* --- the layers after the first: float32, channels last ---------------------------------------------------------- */

struct layer {
    int64_t batch, height, width, inputs, outputs, kernel, stride; /* outputs, kernel * inputs: multiples of LANES */
};

/* Strides of a sum of products: c[row] += sum over i and j of a[row, i, j] * b[i, j]. */
struct product {
    int64_t num_i, num_j;
    int64_t a_row, a_i, a_j; /* from one number to the next, in floats */
    int64_t b_i, b_j, c_row;
};

PART void multiply(const int rows, const int vectors, const struct product *product, const float *a, const float *b,
                   float *c)
{
    vector sums[MOST_ROWS * 2] = {{0}};
    for (int64_t i = 0; i < product->num_i; i++, a += product->a_i, b += product->b_i) {
        const float *left = a, *right = b;
        for (int64_t j = 0; j < product->num_j; j++, left += product->a_j, right += product->b_j) {
            vector factors[2];
            for (int v = 0; v < vectors; v++)
                factors[v] = VECTOR(right, v);
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++) {
                float factor = left[row * product->a_row];
                for (int v = 0; v < vectors; v++)
                    sums[row * vectors + v] += factors[v] * factor;
            }
        }
    }
    for (int row = 0; row < rows; row++) /* One after the other: rows of `c` may overlap. */
        for (int v = 0; v < vectors; v++)
            VECTOR(c + row * product->c_row, v) += sums[row * vectors + v];
}

/* Multiplies any number of rows and columns, in blocks of nearly equal size that fit into registers. */
#define BLOCK(rows, vectors) \
    case (rows) * 2 + (vectors) - 1: \
        multiply(rows, vectors, product, left, right, to); \
        break;

FAST static void multiply_all(int64_t rows, int64_t columns, const struct product *product, const float *a,
                              const float *b, float *c)
{
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = rows * block / blocks, num = rows * (block + 1) / blocks - first;
        const float *left = a + first * product->a_row;
        for (int64_t column = 0; column < columns; column += 2 * LANES) {
            const float *right = b + column;
            float *to = c + first * product->c_row + column;
            switch (num * 2 + (column + LANES < columns)) {
                BLOCK(1, 1) BLOCK(1, 2) BLOCK(2, 1) BLOCK(2, 2) BLOCK(3, 1) BLOCK(3, 2)
                BLOCK(4, 1) BLOCK(4, 2) BLOCK(5, 1) BLOCK(5, 2) BLOCK(6, 1) BLOCK(6, 2)
            }
        }
    }
}

static int64_t layer_output_size(const struct layer *layer, int64_t pixels)
{
    return (pixels - layer->kernel) / layer->stride + 1;
}

/* Computes the layer and its ReLU.
 *
 * in:     float32[batch, height, width, inputs]
 * weight: float32[kernel, kernel, inputs, outputs]
 * bias:   float32[outputs]
 * out:    float32[batch, output height, output width, outputs]
 */
FAST void apex_layer(const struct layer *layer, const float *in, const float *weight, const float *bias, float *out)
{
    int64_t rows = layer_output_size(layer, layer->height), columns = layer_output_size(layer, layer->width);
    int64_t line = layer->width * layer->inputs, window = layer->kernel * layer->inputs, outputs = layer->outputs;
    struct product product = {
        layer->kernel, window, layer->stride * layer->inputs, line, 1, window * outputs, outputs, outputs};
    for (int64_t b = 0; b < layer->batch; b++, in += layer->height * line)
        for (int64_t i = 0; i < rows; i++, out += columns * outputs) {
            for (int64_t at = 0; at < columns * outputs; at += outputs)
                for (int64_t o = 0; o < outputs; o += LANES)
                    VECTOR(out + at + o, 0) = VECTOR(bias + o, 0);
            multiply_all(columns, outputs, &product, in + i * layer->stride * line, weight, out);
            rectify(out, columns * outputs);
        }
}

/* in:              as above
 * gradient:        float32[batch, output height, output width, outputs], of the output of `apex_layer`
 * weight_gradient: float32[kernel, kernel, inputs, outputs], incremented by the result
 */
FAST void apex_layer_weight_gradient(const struct layer *layer, const float *in, const float *gradient,
                                     float *weight_gradient)
{
    int64_t rows = layer_output_size(layer, layer->height), columns = layer_output_size(layer, layer->width);
    int64_t line = layer->width * layer->inputs, window = layer->kernel * layer->inputs, outputs = layer->outputs;
    struct product product = {
        rows, columns, 1, layer->stride * line, layer->stride * layer->inputs, columns * outputs, outputs, outputs};
    for (int64_t b = 0; b < layer->batch; b++, in += layer->height * line, gradient += rows * columns * outputs)
        for (int64_t y = 0; y < layer->kernel; y++)
            multiply_all(window, outputs, &product, in + y * line, gradient, weight_gradient + y * window * outputs);
}

/* Propagates the gradient through the layer, and through the ReLU whose output was `in`: it is 0 where `in` is 0.
 *
 * in, gradient: as above
 * transposed:   float32[kernel, outputs, kernel, inputs], the weights, transposed
 * in_gradient:  float32[batch, height, width, inputs]
 */
FAST void apex_layer_input_gradient(const struct layer *layer, const float *in, const float *gradient,
                                    const float *transposed, float *in_gradient)
{
    int64_t rows = layer_output_size(layer, layer->height), columns = layer_output_size(layer, layer->width);
    int64_t line = layer->width * layer->inputs, window = layer->kernel * layer->inputs, outputs = layer->outputs;
    struct product product = {1, outputs, outputs, 0, 1, 0, window, layer->stride * layer->inputs};
    int64_t size = layer->height * line;
    for (int64_t b = 0; b < layer->batch; b++, in += size, in_gradient += size) {
        for (int64_t at = 0; at < size; at++)
            in_gradient[at] = 0;
        for (int64_t i = 0; i < rows; i++, gradient += columns * outputs)
            for (int64_t y = 0; y < layer->kernel; y++)
                multiply_all(columns, window, &product, gradient, transposed + y * outputs * window,
                             in_gradient + (i * layer->stride + y) * line);
        for (int64_t at = 0; at < size; at++)
            in_gradient[at] = in[at] > 0 ? in_gradient[at] : 0;
    }
}

/* --- bfloat16; torch computes its convolutions -------------------------------------------------------------------- */

/* Returns the bits of a pixel as float32. Their upper half is its bfloat16, which represents 0 ... 255 exactly. */
PART uint32_t bits(uint8_t pixel)
{
    float number = pixel;
    uint32_t result;
    memcpy(&result, &number, sizeof result);
    return result;
}

struct planes {
    int64_t batch, pixels;
};

/* images: uint8[batch, 4, pixels]
 * out:    bfloat16[batch, pixels, 4], two in each element of `out`
 */
FAST void apex_interleave(const struct planes *planes, const uint8_t *images, uint32_t *out)
{
    int64_t pixels = planes->pixels;
    for (int64_t b = 0; b < planes->batch; b++, images += 4 * pixels, out += 2 * pixels)
        for (int64_t i = 0; i < pixels; i++) {
            out[2 * i] = bits(images[i]) >> 16 | bits(images[pixels + i]);
            out[2 * i + 1] = bits(images[2 * pixels + i]) >> 16 | bits(images[3 * pixels + i]);
        }
}

int64_t apex_convolution_works(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#else

void apex_convolve(void) {}
void apex_convolve_weight_gradient(void) {}
void apex_layer(void) {}
void apex_layer_weight_gradient(void) {}
void apex_layer_input_gradient(void) {}
void apex_interleave(void) {}
int64_t apex_convolution_works(void) { return 0; }

#endif

/* version of the functions' arguments, as in decompress.c */
const int64_t apex_interface = 3;

/* SHA-256 of this file, set by setup.py and compared by native.py */
#ifndef APEX_SOURCE
#define APEX_SOURCE ""
#endif
const char apex_source[65] = APEX_SOURCE;
