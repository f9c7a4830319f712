// Trains a classification file of tflite_tools.export in an Android app, with LiteRT's Interpreter.

package com.example.digits

import java.io.File
import java.io.FileOutputStream
import java.io.IOException
import java.nio.ByteBuffer
import java.nio.ByteOrder
import org.tensorflow.lite.DataType
import org.tensorflow.lite.Interpreter
import org.tensorflow.lite.Tensor

/**
 * The signatures of an exported file.
 *
 * It is not thread-safe, and a step is long for a frame: give it one background thread of its own,
 * as `Dispatchers.Default.limitedParallelism(1)` or an `Executors.newSingleThreadExecutor()`, and
 * call everything there, [close] included.
 *
 * @param model The whole file; of one that is cut off, the interpreter may take the app down. Map
 *   an asset into memory, or give a `File` to `Interpreter` in its place.
 */
class DigitsTrainer(model: ByteBuffer) : AutoCloseable {
    class Step(val loss: Float, val accuracy: Float)

    private val interpreter = Interpreter(model)

    val batchSize: Int = interpreter.getInputTensorFromSignature("x", "train").shape()[0]

    private val x = input("train", "x")
    private val y = input("train", "y")
    private val learningRate = input("train", "learning_rate")
    private val loss = output("train", "loss")
    private val accuracy = output("train", "sparse_categorical_accuracy")
    private val scores = output("infer", "output")
    private val nothing = input("get_weights", "nothing")

    // By name, so that the order is the same in every runtime. The buffers are both what
    // get_weights returns and what set_weights takes.
    private val variables =
        interpreter.getSignatureInputs("set_weights").sorted().associateWith {
            input("set_weights", it)
        }

    /** One step on one batch of [batchSize] samples; the results are those before the step. */
    fun train(samples: FloatArray, labels: IntArray, rate: Float): Step {
        fill(samples)
        require(labels.size == batchSize) { "${labels.size} labels; it must be $batchSize." }
        y.asIntBuffer().put(labels)
        learningRate.putFloat(0, rate)
        run(
            "train",
            mapOf("x" to x, "y" to y, "learning_rate" to learningRate),
            mapOf("loss" to loss, "sparse_categorical_accuracy" to accuracy),
        )
        return Step(loss.getFloat(0), accuracy.getFloat(0))
    }

    /** The most likely class of each sample of one batch. */
    fun infer(samples: FloatArray): IntArray {
        fill(samples)
        run("infer", mapOf("x" to x), mapOf("output" to scores))
        val classes = scores.capacity() / Float.SIZE_BYTES / batchSize
        return IntArray(batchSize) { sample ->
            (0 until classes).maxByOrNull {
                scores.getFloat((sample * classes + it) * Float.SIZE_BYTES)
            }!!
        }
    }

    /**
     * Writes every variable, those of the optimizer included, as a `.safetensors` file that
     * `tflite_tools.Trainer.load` and `train.cc` read. Whole or not at all: an app can be killed
     * at any time.
     */
    fun save(file: File) {
        run("get_weights", mapOf("nothing" to nothing), variables)
        val part = File(file.path + ".part")
        FileOutputStream(part).use { stream ->
            stream.write(header())
            for (buffer in variables.values) {
                buffer.rewind()
                while (buffer.hasRemaining()) stream.channel.write(buffer)
            }
            stream.fd.sync()
        }
        if (!part.renameTo(file)) throw IOException("Cannot replace $file. Is it a folder?")
    }

    /** Goes on from what [save] wrote. Nothing changes if the file is of another model. */
    fun load(file: File) {
        val content = file.readBytes()
        val header = header()
        val size = header.size + variables.values.sumOf { it.capacity() }
        if (content.size != size || !content.copyOf(header.size).contentEquals(header)) {
            throw IOException(
                "$file (${content.size} bytes) is not a whole checkpoint of this model ($size " +
                    "bytes). Remove it to start from the model."
            )
        }
        var offset = header.size
        for (buffer in variables.values) {
            buffer.rewind()
            buffer.put(content, offset, buffer.capacity())
            offset += buffer.capacity()
        }
        run("set_weights", variables, emptyMap())
    }

    override fun close() = interpreter.close()

    private fun fill(samples: FloatArray) {
        val size = x.capacity() / Float.SIZE_BYTES
        require(samples.size == size) { "${samples.size} numbers in samples; it must be $size." }
        x.asFloatBuffer().put(samples)
    }

    private fun run(
        signature: String,
        inputs: Map<String, ByteBuffer>,
        outputs: Map<String, ByteBuffer>,
    ) {
        // The interpreter writes from a buffer's position on, and leaves it at the end.
        outputs.values.forEach { it.rewind() }
        interpreter.runSignature(inputs, outputs, signature)
        (inputs.values + outputs.values).forEach { it.rewind() }
    }

    private fun input(signature: String, name: String) =
        allocate(interpreter.getInputTensorFromSignature(name, signature))

    private fun output(signature: String, name: String) =
        allocate(interpreter.getOutputTensorFromSignature(name, signature))

    private fun allocate(tensor: Tensor): ByteBuffer =
        ByteBuffer.allocateDirect(tensor.numBytes()).order(ByteOrder.nativeOrder())

    // What stands before the data: a length and JSON with all names and shapes, so that what begins
    // with it fits the model, and nothing has to be parsed.
    private fun header(): ByteArray {
        var offset = 0
        val entries =
            variables.map { (name, buffer) ->
                val tensor = interpreter.getInputTensorFromSignature(name, "set_weights")
                val type =
                    when (tensor.dataType()) {
                        DataType.FLOAT32 -> "F32"
                        DataType.INT32 -> "I32"
                        DataType.INT64 -> "I64"
                        else -> throw IOException("$name is of a type that is not saved.")
                    }
                val shape = tensor.shape().joinToString(",", "[", "]")
                val start = offset
                offset += buffer.capacity()
                """"$name":{"dtype":"$type","shape":$shape,"data_offsets":[$start,$offset]}"""
            }
        val json = entries.joinToString(",", "{", "}").toByteArray()
        val padded = json + ByteArray(-json.size and 7) { ' '.code.toByte() }
        val length = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN)
        length.putLong(0, padded.size.toLong())
        return length.array() + padded
    }
}
